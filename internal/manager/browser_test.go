package manager

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"image"
	"image/png"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"
)

// browser is a headless Chromium, driven by its debugging protocol over a pipe.
type browser struct {
	t       *testing.T
	out     *os.File
	session string

	mu      sync.Mutex
	last    int
	answers map[int]chan json.RawMessage
	wrong   []string // errors of the page's code and refusals by its security policy
	gone    chan struct{}
}

// chromium returns the program, and skips the test if there is none, except in CI.
func chromium(t *testing.T) string {
	t.Helper()
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	if os.Getenv("CI") != "" {
		t.Fatal("no chromium: scripts/deps test installs it")
	}
	t.Skip("no chromium")
	return ""
}

func startBrowser(t *testing.T) *browser {
	t.Helper()
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	theirs, ours, err := os.Pipe()
	ok(err)
	in, answers, err := os.Pipe()
	ok(err)
	cmd := exec.Command(chromium(t), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
		"--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe", "--user-data-dir="+filepath.Join(dir, "profile"))
	cmd.ExtraFiles = []*os.File{theirs, answers}
	cmd.Env = append(os.Environ(), "HOME="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var said bytes.Buffer
	cmd.Stderr = &said
	ok(cmd.Start())
	theirs.Close()
	answers.Close()
	b := &browser{t: t, out: ours, answers: map[int]chan json.RawMessage{}, gone: make(chan struct{})}
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // with its helper processes
		_ = cmd.Wait()
		ours.Close()
		in.Close()
		<-b.gone
		if t.Failed() {
			t.Logf("the browser said:\n%.4000s", said.String())
		}
	})
	go b.read(in)
	var target struct{ TargetID string }
	ok(json.Unmarshal(b.call("Target.createTarget", map[string]any{"url": "about:blank"}), &target))
	var attached struct{ SessionID string }
	ok(json.Unmarshal(b.call("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}), &attached))
	b.session = attached.SessionID
	for _, domain := range []string{"Page", "Runtime", "Log"} {
		b.call(domain+".enable", nil)
	}
	return b
}

// read takes the answers and events of the browser, each ended by a zero byte.
func (b *browser) read(in *os.File) {
	defer close(b.gone)
	for r := bufio.NewReader(in); ; {
		text, err := r.ReadBytes(0)
		if err != nil {
			return
		}
		var m struct {
			ID            int
			Method        string
			Result, Error json.RawMessage
			Params        struct {
				Entry            struct{ Level, Text, Source string }
				ExceptionDetails struct {
					Text      string
					Exception struct{ Description string }
				}
			}
		}
		if json.Unmarshal(text[:len(text)-1], &m) != nil {
			continue
		}
		b.mu.Lock()
		switch {
		case m.ID != 0 && m.Error == nil:
			b.answers[m.ID] <- m.Result
		case m.ID != 0:
			b.answers[m.ID] <- nil
		case m.Method == "Runtime.exceptionThrown":
			b.wrong = append(b.wrong, m.Params.ExceptionDetails.Text+" "+m.Params.ExceptionDetails.Exception.Description)
		case m.Method == "Log.entryAdded" && m.Params.Entry.Level == "error" && m.Params.Entry.Source != "network":
			b.wrong = append(b.wrong, m.Params.Entry.Text)
		}
		b.mu.Unlock()
	}
}

// call calls a method of the debugging protocol and returns the result.
func (b *browser) call(method string, params any) json.RawMessage {
	b.t.Helper()
	r := b.try(method, params)
	if r == nil {
		b.t.Fatalf("%s: refused; the page: %v", method, b.errors())
	}
	return r
}

// try is call for methods that may fail. It returns nil if the browser refuses.
func (b *browser) try(method string, params any) json.RawMessage {
	b.t.Helper()
	if params == nil {
		params = struct{}{}
	}
	answer := make(chan json.RawMessage, 1)
	b.mu.Lock()
	b.last++
	id := b.last
	b.answers[id] = answer // at most one answer comes
	b.mu.Unlock()
	m := map[string]any{"id": id, "method": method, "params": params}
	if b.session != "" {
		m["sessionId"] = b.session
	}
	text, err := json.Marshal(m)
	if err == nil {
		_, err = b.out.Write(append(text, 0))
	}
	if err != nil {
		b.t.Fatalf("%s: %v", method, err)
	}
	select {
	case r := <-answer:
		return r
	case <-b.gone:
		b.t.Fatalf("%s: the browser has ended", method)
	case <-time.After(time.Minute):
		b.t.Fatalf("%s: no answer", method)
	}
	return nil
}

// errors returns what was wrong since the last call.
func (b *browser) errors() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	wrong := b.wrong
	b.wrong = nil
	return wrong
}

// eval evaluates an expression, waits for its promise, and stores the value.
func (b *browser) eval(expression string, into any) {
	b.t.Helper()
	var r struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails json.RawMessage
	}
	if err := json.Unmarshal(b.call("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true, "awaitPromise": true}), &r); err != nil || r.ExceptionDetails != nil {
		b.t.Fatalf("%s: %v %s", expression, err, r.ExceptionDetails)
	}
	if into != nil {
		if err := json.Unmarshal(r.Result.Value, into); err != nil {
			b.t.Fatalf("%s: %v in %s", expression, err, r.Result.Value)
		}
	}
}

// holds reports whether a condition holds. While a page is being replaced, none does.
func (b *browser) holds(condition string) bool {
	b.t.Helper()
	var r struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails json.RawMessage
	}
	raw := b.try("Runtime.evaluate", map[string]any{"expression": "!!(" + condition + ")", "returnByValue": true})
	return raw != nil && json.Unmarshal(raw, &r) == nil && r.ExceptionDetails == nil && string(r.Result.Value) == "true"
}

// waitFor returns when a condition holds.
func (b *browser) waitFor(condition string) {
	b.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(30 * time.Second); !b.holds(condition); <-tick.C {
		if time.Now().After(end) {
			var text string
			b.eval("document.querySelectorAll('#map a').length + ' ' + document.querySelectorAll('canvas').length + document.body.innerText", &text)
			b.picture("never")
			b.t.Fatalf("never: %s; errors %v; the page says\n%.2000s", condition, b.errors(), text)
		}
	}
}

// show sets the window and the colour scheme, and loads an address.
func (b *browser) show(address string, width, height int, scheme string) {
	b.t.Helper()
	b.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600})
	b.call("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": scheme}}})
	b.call("Page.navigate", map[string]any{"url": address})
	b.waitFor("document.readyState === 'complete' && document.documentElement.dataset.ready !== undefined")
}

// picture returns the whole page as it is drawn. With RFAAS_SCREENSHOTS set it is also written to that directory.
func (b *browser) picture(name string) image.Image {
	b.t.Helper()
	b.eval("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))", nil)
	var shot struct{ Data string }
	if err := json.Unmarshal(b.call("Page.captureScreenshot", map[string]any{"captureBeyondViewport": true}), &shot); err != nil {
		b.t.Fatal(err)
	}
	raw, err := base64.StdEncoding.DecodeString(shot.Data)
	if err != nil {
		b.t.Fatal(err)
	}
	if dir := os.Getenv("RFAAS_SCREENSHOTS"); dir != "" {
		if err := os.WriteFile(filepath.Join(dir, name+".png"), raw, 0o644); err != nil {
			b.t.Fatal(err)
		}
	}
	img, err := png.Decode(bytes.NewReader(raw))
	if err != nil {
		b.t.Fatal(err)
	}
	return img
}
