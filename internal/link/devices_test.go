package link

import (
	"errors"
	"testing"

	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// A resource manager that ends while a process attaches makes every provider fail. Afterwards the process holds no device that it does not use.
func TestOnlyTheDeviceInUseStaysOpen(t *testing.T) {
	var d Devices
	defer d.Close()
	gone := errors.New("the manager has ended")
	for _, works := range []string{dataplane.SHM, "", dataplane.TCP, dataplane.SHM, ""} {
		provider, err := d.Try([]string{dataplane.SHM, dataplane.TCP}, func(dev *dataplane.Device) error {
			if dev.Provider() == works {
				return nil
			}
			return gone
		})
		if provider != works || (works == "") != errors.Is(err, gone) {
			t.Errorf("attached by %q (%v), want %q", provider, err, works)
		}
		var open []string
		for _, dev := range d.open {
			open = append(open, dev.Provider())
		}
		if works != "" && (len(open) != 1 || open[0] != works) || works == "" && len(open) > 0 {
			t.Errorf("Try used %q and left %q open, want only the used device", works, open)
		}
	}
}
