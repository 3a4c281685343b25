package latency

import (
	"bytes"
	"io"
	"math"
	"testing"
)

// Results that were read can be compared with the bounds and each other, written in every form, and read back unchanged.
func FuzzReadJSON(f *testing.F) {
	f.Add([]byte(`{"name":"latency","provider":"shm","client":"c","mode":"hot","payload":8,"depth":1,"pairs":9,"ratio":1.1,"p50_ns":120}`+"\n"), []byte{})
	f.Add([]byte("some text\n {\"ratio\":null,\"calibration_ns\":{\"before\":1,\"after\":null},\"near\":true}\n"), []byte("{}"))
	f.Add([]byte(`{"ratio":1e400}`), []byte(`{"ratio":"x"}`))
	f.Add([]byte("{\n"), []byte("\r\n{}\r\n"))
	f.Fuzz(func(t *testing.T, old, now []byte) {
		a, err := ReadJSON(bytes.NewReader(old))
		if err != nil {
			return
		}
		var text bytes.Buffer
		if err := WriteJSON(&text, a...); err != nil {
			t.Fatal(err)
		}
		again, err := ReadJSON(&text)
		if err != nil || len(again) != len(a) {
			t.Fatalf("%d results are written and %d read: %v", len(a), len(again), err)
		}
		for i, r := range a {
			Check(r)
			x, y := float64(r.Ratio), float64(again[i].Ratio)
			if r.Key() != again[i].Key() || math.IsNaN(x) != math.IsNaN(y) {
				t.Errorf("%+v reads back as %+v", r, again[i])
			}
		}
		if WriteCSV(io.Discard, a...) != nil || WriteTable(io.Discard, a...) != nil {
			t.Error("results that were read cannot be written")
		}
		b, err := ReadJSON(bytes.NewReader(now))
		if err != nil {
			return
		}
		changes, _, _ := Compare(a, b)
		if err := WriteChanges(io.Discard, changes); err != nil {
			t.Error(err)
		}
	})
}
