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
		devices int
		load    func() error
		want    []string
		err     string
	}{
		"nothing asked, no device":            {nil, 0, missing, []string{"shm"}, ""},
		"nothing asked, a device":             {nil, 1, loads, []string{"shm", "verbs"}, ""},
		"shm asked, a device":                 {[]string{"shm"}, 1, loads, []string{"shm"}, ""},
		"verbs asked, a device":               {[]string{"verbs"}, 1, loads, []string{"verbs"}, ""},
		"verbs asked, no device":              {[]string{"shm", "verbs"}, 0, loads, nil, "no verbs device"},
		"verbs asked, the library is missing": {[]string{"verbs"}, 0, missing, nil, "libibverbs.so.1"},
	} {
		got, err := chooseProviders(c.asked, c.devices, c.load)
		if !slices.Equal(got, c.want) || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}
