package grant

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
)

// CheckDataTime is how long CheckData waits for an executor's data port.
const CheckDataTime = 2 * time.Second

// CheckData connects to the data address of an executor on tcp, as a client does to call functions, and closes the connection. The executor
// is reached at address for control messages. An error says why no client of this node can use the data address, and advice says what to do.
func CheckData(ctx context.Context, address, data string) (advice string, err error) {
	at, err := netip.ParseAddrPort(data)
	if err != nil || at.Addr().Zone() != "" { // a zone can be any text
		return "upgrade the executor", fmt.Errorf("its data address %.64q is not an IP address and a port", data)
	}
	ctx, cancel := context.WithTimeout(ctx, CheckDataTime)
	defer cancel()
	h, err := homeAt(ctx, address)
	if err != nil {
		return "", err
	}
	if why := h.Refuse("executor", at.Addr()); why != "" {
		return "set data-advertise of the executor to an address that clients can reach", fmt.Errorf("its data address %s %s", data, why)
	}
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", at.String())
	if err == nil {
		c.Close()
		return "", nil
	}
	if os.IsTimeout(err) || errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("no answer within %v", CheckDataTime)
	} else if reason := (*os.SyscallError)(nil); errors.As(err, &reason) {
		err = reason.Err
	}
	return remedy(h, at.Addr().Unmap()), fmt.Errorf("its data address %s: %w", data, err)
}

// homeAt returns the home of the executor at a control address.
func homeAt(ctx context.Context, address string) (control.Home, error) {
	a, err := control.ParseAddress(address)
	if err != nil || a.Network == "unix" {
		return control.Home{Here: true}, err
	}
	host, _, err := net.SplitHostPort(a.Target)
	if err != nil {
		return control.Home{}, err
	}
	all, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return control.Home{}, err
	}
	return control.ListOwnAddresses().HomeOf(all[0].Unmap().WithZone(""), netip.Addr{}), nil
}
