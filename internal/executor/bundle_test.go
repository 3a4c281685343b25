package executor

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/rfaas-go/rfaas/internal/control"
)

// archive returns an archive with a file, followed by zeros up to a size, and its hash.
func archive(t *testing.T, name, content string, size int) ([]byte, sum) {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: name, Size: int64(len(content)), Typeflag: tar.TypeReg}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte(content)); err != nil {
		t.Fatal(err)
	}
	w.Close()
	all := make([]byte, size)
	copy(all, b.Bytes())
	return all, sha256.Sum256(all)
}

func bundleNode(t *testing.T) (n *node, path string) {
	t.Helper()
	b, err := openBundles(t.TempDir(), rights{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.close)
	return newNode(t, func(c *Config) { c.Bundles = b }), b.path
}

// TestBundleOfAnotherTenant stores a bundle once. Another tenant that knows its hash must send its bytes. A table with the same
// bytes is not taken for the bundle.
func TestBundleOfAnotherTenant(t *testing.T) {
	n, path := bundleNode(t)
	b, h := archive(t, "file", "content", 16384)
	var calls atomic.Int32
	add := func(owner string, b []byte) error {
		_, err := n.e.tables.add(t.Context(), h, true, owner, uint64(len(b)), bytesFrom(b, &calls))
		return err
	}
	for range 2 {
		if err := add("tenant ann", b); err != nil {
			t.Fatal(err)
		}
	}
	if calls.Load() != 1 || n.e.table.Capacity().SetAside != 16384 {
		t.Errorf("fetched %d times, %d bytes set aside", calls.Load(), n.e.table.Capacity().SetAside)
	}
	if _, unknown := n.e.tables.acquire([]tableRef{{bundleKey(h), isBundle}}, "tenant bob"); len(unknown) != 1 {
		t.Fatal("bob may use ann's bundle")
	}
	wrong := bytes.Clone(b)
	wrong[16000]++
	refuses(t, "other bytes", add("tenant bob", wrong), control.ClassInvalid, "announced as SHA-256")
	if err := add("tenant bob", b); err != nil {
		t.Fatal(err)
	}
	if _, unknown := n.e.tables.acquire([]tableRef{{h, isTable}}, "tenant ann"); len(unknown) != 1 {
		t.Error("a bundle is taken for a table")
	}
	found, _ := filepath.Glob(path + "/*/file")
	if len(found) != 1 {
		t.Fatalf("unpacked: %q", found)
	}
	if content, err := os.ReadFile(found[0]); string(content) != "content" || err != nil {
		t.Errorf("%q, %v", content, err)
	}
	if !n.e.tables.evictOne() || n.e.table.Capacity().SetAside != 0 {
		t.Error("an unused bundle was not evicted")
	}
	if left, _ := os.ReadDir(path); len(left) != 0 {
		t.Errorf("%d directories are left", len(left))
	}
}

// TestBundleNamedAsTable requests leases as a forged client can, which gives the hash by which the store keeps something of another kind.
func TestBundleNamedAsTable(t *testing.T) {
	n, _ := bundleNode(t)
	var calls atomic.Int32
	bundle, hb := archive(t, "file", "content", 16384)
	tab, ht := library(5000)
	_, err := n.e.tables.add(t.Context(), hb, true, "", 16384, bytesFrom(bundle, &calls))
	_, err2 := n.e.tables.add(t.Context(), ht, false, "", 5000, bytesFrom(tab, &calls))
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	keyB, keyT := bundleKey(hb), bundleKey(ht)
	r := n.request(1)
	r.Tables = []*control.Table{{Name: "t", Sha256: keyB[:], Size: 16384}}
	r.Bundle = &control.Table{Sha256: keyT[:], Size: 5000}
	reply, err := n.Lease(n.ctx(), r)
	if err != nil || fmt.Sprint(reply.GetTablesUnknown()) != "[0 1]" {
		t.Errorf("the wrong kinds: %v, %v", reply, err)
	}
	r.Tables[0].Sha256, r.Bundle.Sha256 = ht[:], hb[:]
	if reply, err = n.Lease(n.ctx(), r); err != nil || len(reply.GetTablesUnknown()) > 0 || reply.GetLeaseId() == 0 {
		t.Errorf("the right kinds: %v, %v", reply, err)
	}
}

// TestBundleRefused leaves nothing of a bundle that cannot be unpacked.
func TestBundleRefused(t *testing.T) {
	n, path := bundleNode(t)
	var calls atomic.Int32
	good, h := archive(t, "file", "content", 16384)
	outside, ho := archive(t, "../file", "content", 16384)
	cramped, hc := archive(t, "file", "content", 4096) // the file takes more memory
	for _, c := range []struct {
		what string
		h    sum
		b    []byte
		text string
	}{
		{"changed", h, append([]byte{}, cramped...), "more than was announced"},
		{"names a file elsewhere", ho, outside, "not a relative path"},
		{"takes more memory than announced", hc, cramped, "more than was announced"},
		{"no archive", sha256.Sum256(good[1:]), good[1:], "bundle: entry 0"},
		{"other bytes", h, append(bytes.Clone(good[:16383]), 1), "announced as SHA-256"},
	} {
		_, err := n.e.tables.add(t.Context(), c.h, true, "tenant ann", uint64(len(c.b)), bytesFrom(c.b, &calls))
		refuses(t, c.what, err, control.ClassInvalid, c.text)
		if left, _ := os.ReadDir(path); len(left) != 0 || n.e.table.Capacity().SetAside != 0 {
			t.Errorf("%s: %d directories are left, %d bytes set aside", c.what, len(left), n.e.table.Capacity().SetAside)
		}
	}
}

// TestBundlesOfDeadExecutor removes the directory of an executor that was killed, and keeps that of a running one.
func TestBundlesOfDeadExecutor(t *testing.T) {
	in := t.TempDir()
	log := slog.New(slog.DiscardHandler)
	dead := filepath.Join(in, bundlePrefix+"dead")
	if err := os.MkdirAll(filepath.Join(dead, "x"), 0o755); err != nil {
		t.Fatal(err)
	}
	running, err := openBundles(in, rights{}, log)
	if err != nil {
		t.Fatal(err)
	}
	other, err := openBundles(in, rights{}, log)
	if err != nil {
		t.Fatal(err)
	}
	defer other.close()
	if _, err := os.Stat(dead); err == nil {
		t.Error("the directory of the dead executor was not removed")
	}
	if _, err := os.Stat(running.path); err != nil {
		t.Error(err)
	}
	running.close()
	if b, err := openBundles(filepath.Join(in, "missing"), rights{}, log); b != nil || err == nil || !strings.Contains(err.Error(), "bundle-dir: ") || !strings.Contains(err.Error(), in) {
		t.Errorf("in a directory that does not exist: %v, %v", b, err)
	}
}

// TestBundlesOfExecutorsThatStart starts executors, while others that start look for directories to remove.
func TestBundlesOfExecutorsThatStart(t *testing.T) {
	in := t.TempDir()
	log := slog.New(slog.DiscardHandler)
	var over atomic.Bool
	var others sync.WaitGroup
	for range 4 {
		others.Go(func() {
			for !over.Load() {
				removeBundles(in, uint32(os.Geteuid()), log)
			}
		})
	}
	for i := 0; i < 300 && !t.Failed(); i++ {
		b, err := openBundles(in, rights{}, log)
		if err != nil {
			t.Errorf("directory %d: %v", i, err)
			break
		}
		if _, err := os.Stat(b.path); err != nil {
			t.Errorf("directory %d: %v", i, err)
		}
		b.close()
	}
	over.Store(true)
	others.Wait()
	if left, _ := os.ReadDir(in); len(left) > 0 {
		t.Errorf("%d directories are left", len(left))
	}
}
