package link

import (
	"errors"
	"fmt"
	"slices"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Providers returns the providers by which the node nodeID can reach a manager's memory, the best first: shared memory on the manager's own
// node, then verbs, then tcp. wanted ("shm", "verbs", "tcp") allows only that one;
// the memory has no provider "ofi", which therefore allows all. If the result is empty, use messages.
func Providers(hello *control.ManagerHelloReply, nodeID string, wanted string) []string {
	var found []string
	for _, p := range []string{dataplane.SHM, dataplane.Verbs, dataplane.TCP} {
		here := p != dataplane.SHM || nodeID != "" && hello.GetNodeId() == nodeID
		if here && slices.Contains(hello.GetProviders(), p) && (wanted == "" || wanted == "auto" || wanted == dataplane.OFI || wanted == p) {
			found = append(found, p)
		}
	}
	return found
}

// ErrNoWay means that no provider of the manager's memory can be used on this node.
var ErrNoWay = errors.New("no provider of this node reaches the resource manager's memory")

// Devices are the devices by which a process reaches a manager's memory. Each is opened when it is tried, and stays open only if attach
// succeeded. One goroutine at a time may use them.
type Devices struct {
	Options dataplane.Options // of a verbs device, and encryption on tcp
	open    []*dataplane.Device
}

// Try calls attach with the device of each provider, in this order, until it succeeds, and returns that provider. Otherwise it
// returns the last error of attach, or ErrNoWay if no device could be opened. It closes every device
// except the one that attached, so failed attempts leave nothing open. Nothing may be attached when Try is called.
func (d *Devices) Try(providers []string, attach func(*dataplane.Device) error) (provider string, err error) {
	err = ErrNoWay
	for _, p := range providers {
		dev, missing := d.device(p)
		if missing != nil {
			if errors.Is(err, ErrNoWay) {
				err = fmt.Errorf("%w: %w", err, missing)
			}
			continue
		}
		if err = attach(dev); err == nil {
			d.keep(dev)
			return p, nil
		}
	}
	d.keep(nil)
	return "", err
}

// keep closes all devices but one.
func (d *Devices) keep(used *dataplane.Device) {
	d.open = slices.DeleteFunc(d.open, func(dev *dataplane.Device) bool {
		if dev == used {
			return false
		}
		dev.Close()
		return true
	})
}

func (d *Devices) device(provider string) (*dataplane.Device, error) {
	for _, dev := range d.open {
		if dev.Provider() == provider {
			return dev, nil
		}
	}
	o := d.Options
	o.ActiveOnly = provider == dataplane.TCP // the manager listens
	dev, err := dataplane.Open(provider, o)
	if err == nil {
		d.open = append(d.open, dev)
	}
	return dev, err
}

// Close closes the devices. Everything that was attached by them must be closed.
func (d *Devices) Close() { d.keep(nil) }
