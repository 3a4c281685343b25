package dataplane

import (
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

// After a process has given up root, each of its threads can use a connection of a device with OneThread. Some threads are older than the change.
func TestProviderAfterChangeOfUser(t *testing.T) {
	testkit.Root(t, "changes its user")
	const changed = "RFAAS_TEST_CHANGED_USER"
	if os.Getenv(changed) == "" { // in a process of its own, since it cannot change back
		cmd := exec.Command(os.Args[0], "-test.run=^TestProviderAfterChangeOfUser$")
		cmd.Env = append(os.Environ(), changed+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	threads := make([]*thread, 3)
	for i := range threads {
		threads[i] = startThread()
		threads[i].do(runtime.Gosched) // it exists
	}
	const nobody = 65534
	if err := syscall.Setresuid(nobody, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	providers(t, func(t *testing.T, provider string) {
		dev, err := Open(provider, Options{GIDIndex: -1, OneThread: true})
		if err != nil {
			t.Fatal(err)
		}
		peer := side{dev, t}
		t.Cleanup(dev.Close)
		od := openSide(t, provider).domain()
		m := alloc(t, od, 8, RemoteRead|RemoteWrite)
		_, c := connect(t, od, peer.domain(), m)
		for i, th := range threads {
			th.do(func() { err = c.Write([]byte{byte(i)}, m.Ref().Addr, m.Ref().Key, soon) })
			if err != nil {
				t.Errorf("thread %d: %v", i, err)
			}
		}
	})
}
