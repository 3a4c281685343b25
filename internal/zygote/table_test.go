package zygote

import (
	"encoding/binary"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// A worker maps a seed as a table only if the seed is of its version, and its root lies in its heap. The extents of the header can be anything.
func TestSeedTable(t *testing.T) {
	z := startZygote(t)
	const at = 0x600000000000
	le := binary.LittleEndian
	for what, c := range map[string]struct {
		change func(h []byte)
		status int32
		text   string
	}{
		"good":              {func([]byte) {}, 0, ""},
		"no seed":           {func(h []byte) { clear(h) }, wire.StatusUnsupported, "has version 0"},
		"another version":   {func(h []byte) { le.PutUint32(h[8:], SeedVersion-1) }, wire.StatusUnsupported, "has version 4, and workers of this executor map version 5"},
		"another size":      {func(h []byte) { le.PutUint64(h[16:], 3*SeedUnit) }, wire.StatusInvalid, "says that its heap has"},
		"no root":           {func(h []byte) { clear(h[seedRoot:seedHeader]) }, wire.StatusInvalid, "call rfaas_set_root"},
		"a root before":     {func(h []byte) { le.PutUint64(h[seedRoot:], at-1) }, wire.StatusInvalid, "does not lie in its memory"},
		"a root behind":     {func(h []byte) { le.PutUint64(h[seedRoot:], at+2*SeedUnit-7) }, wire.StatusInvalid, "does not lie in its memory"},
		"a root that wraps": {func(h []byte) { le.PutUint64(h[seedRoot+8:], 1<<64-1) }, wire.StatusInvalid, "does not lie in its memory"},
		"extents": {func(h []byte) {
			le.PutUint32(h[seedModules+seedModulesMax*seedModuleSize:], 1<<32-1)
			for i := range 1024 {
				le.PutUint64(h[49184+16*i:], uint64(i)*12345678901)
				le.PutUint64(h[49192+16*i:], 1<<64-1-uint64(i))
			}
		}, 0, ""},
	} {
		t.Run(what, func(t *testing.T) {
			fd, err := fixedMemfd("rfaas-seed", int(FileSize(2)), 0)
			if err != nil {
				t.Fatal(err)
			}
			f := os.NewFile(uintptr(fd), "seed")
			defer f.Close()
			h := make([]byte, seedHeader)
			le.PutUint64(h, seedMagic)
			le.PutUint32(h[8:], SeedVersion)
			le.PutUint64(h[16:], 2*SeedUnit)
			le.PutUint64(h[seedRoot:], at+4096)
			le.PutUint64(h[seedRoot+8:], 8)
			c.change(h)
			if _, err := f.WriteAt(h, 2*SeedUnit); err != nil {
				t.Fatal(err)
			}
			s := &Seed{Units: 2}
			if err := s.seal(f); err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			client := startClient(t)
			spec, channel := client.spec(t, sealedFile(t, testLibrary(t)))
			spec.Tables = []Table{{Name: "seed", Size: s.Bytes, Seed: s}}
			w, err := z.Spawn(t.Context(), spec)
			if c.text == "" {
				if err != nil {
					t.Fatal(err)
				}
				defer func() { w.Kill(); <-w.Done() }()
				if err := client.connect(w, channel); err != nil {
					t.Error(err)
				}
				return
			}
			var e *WorkerError
			if !errors.As(err, &e) || e.Status != c.status || !strings.Contains(e.Text, c.text) || !strings.Contains(e.Text, `table "seed"`) {
				t.Errorf("%v, want status %d and %q", err, c.status, c.text)
			}
		})
	}
}
