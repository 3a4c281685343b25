package executor

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

func TestChooseProviders(t *testing.T) {
	loads := func() error { return nil }
	missing := func() error { return errors.New("libibverbs.so.1: no such file") }
	for name, c := range map[string]struct {
		asked   []string
		ofi     bool
		devices int
		load    func() error
		open    func() error
		want    []string
		err     string
	}{
		"nothing asked, no device":            {nil, false, 0, missing, nil, []string{"shm"}, ""},
		"nothing asked, a device":             {nil, false, 1, loads, nil, []string{"shm", "verbs"}, ""},
		"shm asked, a device":                 {[]string{"shm"}, false, 1, loads, nil, []string{"shm"}, ""},
		"verbs asked, a device":               {[]string{"verbs"}, false, 1, loads, nil, []string{"verbs"}, ""},
		"verbs asked, no device":              {[]string{"shm", "verbs"}, false, 0, loads, nil, nil, "no verbs device"},
		"verbs asked, the library is missing": {[]string{"verbs"}, false, 0, missing, nil, nil, "libibverbs.so.1"},
		"ofi configured":                      {nil, true, 0, missing, loads, []string{"shm", "ofi"}, ""},
		"ofi configured, a device":            {nil, true, 1, loads, loads, []string{"shm", "verbs", "ofi"}, ""},
		"ofi asked":                           {[]string{"ofi", "tcp"}, true, 0, missing, loads, []string{"ofi", "tcp"}, ""},
		"ofi asked, it cannot be opened":      {[]string{"ofi"}, true, 0, missing, missing, nil, "providers: ofi was asked for"},
	} {
		got, err := chooseProviders(c.asked, c.ofi, c.devices, c.load, c.open)
		if !slices.Equal(got, c.want) || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}
