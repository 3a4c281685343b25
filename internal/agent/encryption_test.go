package agent

import (
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// The agent decides whether a session encrypts its data: the options come before the environment, the default is on, and where plaintext is
// allowed, "on" leaves it to the executor.
func TestDataEncryptionOfSessions(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret)
	for name, c := range map[string]struct {
		option    string
		plaintext bool
		env       []string
		want      int
	}{
		"default":                    {want: dataplane.EncryptOn},
		"plaintext allowed":          {plaintext: true, want: dataplane.EncryptAllow},
		"plaintext by environment":   {env: []string{"RFAAS_ALLOW_PLAINTEXT=1"}, want: dataplane.EncryptAllow},
		"off":                        {option: "off", want: dataplane.EncryptOff},
		"require":                    {option: "require", plaintext: true, want: dataplane.EncryptRequire},
		"environment":                {env: []string{"RFAAS_DATA_ENCRYPTION=require"}, want: dataplane.EncryptRequire},
		"option before environment":  {option: "on", env: []string{"RFAAS_DATA_ENCRYPTION=off"}, want: dataplane.EncryptOn},
		"unknown word (environment)": {env: []string{"RFAAS_DATA_ENCRYPTION=yes"}, want: -1},
	} {
		p := w.connect(c.env...)
		s := protocol.Session{Session: 1, Executor: x.address, DataEncryption: c.option}
		if c.plaintext {
			s.Flags = protocol.AllowPlaintext
		}
		b, err := p.ask(protocol.OpOpen, s.Encode, nil)
		if c.want < 0 {
			if err == nil || !strings.Contains(err.Error(), `"yes"`) || !strings.Contains(err.Error(), "off, on, require") {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if _, got, err := protocol.DecodeOpened(b); got != c.want || err != nil {
			t.Errorf("%s: %d, %v, want %d", name, got, err, c.want)
		}
	}
}
