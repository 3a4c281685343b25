package zygote

import (
	"bytes"
	"log/slog"
	"regexp"
	"strings"
	"testing"
)

// Long lines are broken, and no byte of them is lost.
func TestLongLines(t *testing.T) {
	for _, length := range []int{1, lineLimit - 1, lineLimit, lineLimit + 1, 3*lineLimit + 7} {
		var log bytes.Buffer
		lines := &lineLogger{log: slog.New(slog.NewTextHandler(&log, nil))}
		want := strings.Repeat("0123456789a", length/11+1)[:length]
		for part := range strings.SplitSeq(want+"\nnext\n", "5") { // in several writes
			if _, err := lines.Write([]byte(part)); err != nil {
				t.Fatal(err)
			}
			lines.Write([]byte("5"))
		}
		var got []string
		for _, m := range regexp.MustCompile(`msg="spawner: (.*)"`).FindAllStringSubmatch(log.String(), -1) {
			got = append(got, m[1])
		}
		n := (length + lineLimit - 1) / lineLimit
		if len(got) != n+1 || strings.Join(got[:n], "") != want || got[n] != "next" {
			t.Errorf("%d bytes were logged as %d lines: %q", length, len(got), got)
		}
	}
}
