package config

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// mustBeUsage checks an error of the loader.
func mustBeUsage(t *testing.T, err error) {
	t.Helper()
	if err != nil && !errors.Is(err, ErrUsage) && !errors.Is(err, ErrDone) {
		t.Errorf("an error that is neither wrong usage nor a wish fulfilled: %v", err)
	}
}

// valid checks settings that were accepted: they can be printed, and loaded again from what was printed.
func valid(t *testing.T, c Executor, args, environ []string) {
	t.Helper()
	if c.Grace <= 0 || c.CodeLimit == 0 || c.CodeLimit > c.CodeCache || c.LeaseMax < c.LeaseDefault || c.VerbsPort < 0 || c.VerbsGIDIndex < -1 {
		t.Errorf("%+v", c)
	}
	var printed strings.Builder
	if _, err := LoadExecutor(append(args, "--print-config"), environ, &printed, "v1"); !errors.Is(err, ErrDone) {
		t.Fatalf("settings that load do not print: %v", err)
	}
	file := filepath.Join(t.TempDir(), "printed.yaml")
	if err := os.WriteFile(file, []byte(printed.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	again, err := LoadExecutor([]string{"--config", file}, home, io.Discard, "v1")
	if err != nil || !reflect.DeepEqual(again, c) {
		t.Errorf("printed as\n%s\nand read again: %v\n%+v\n%+v", printed.String(), err, again, c)
	}
}

func FuzzSettingsFile(f *testing.F) {
	dir := f.TempDir()
	f.Add(false, "grace: 1s\nmemory: 1GiB\ncores: 2-3\nlog-level: debug\nmax-workers: 7\nallow-plaintext: true\n")
	f.Add(true, "grace = \"1s\"\nmemory = \"1GiB\"\ncores = \"2-3\"\nmax-workers = 7\nallow-plaintext = true\n")
	f.Add(false, "a: [")
	f.Add(false, "grace: {a: 1}\n")
	f.Add(false, "cores: 4\nuntil: 2030-01-02T03:04:05Z\nproviders: shm,verbs\nmemory: 1.5GB\n")
	f.Add(true, "[verbs]\ndevice = \"x\"\n")
	f.Add(false, "a: &a [*a]\nb: *a\n")
	f.Add(false, "GRACE: 2s\n? [1]\n: 2\n")
	f.Fuzz(func(t *testing.T, toml bool, text string) {
		file := filepath.Join(dir, map[bool]string{false: "c.yaml", true: "c.toml"}[toml])
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		args := []string{"--config", file}
		c, err := LoadExecutor(args, home, io.Discard, "v1")
		mustBeUsage(t, err)
		if err == nil {
			valid(t, c, args, home)
		}
		_, err = LoadManager(args, home, io.Discard, "v1")
		mustBeUsage(t, err)
	})
}

// FuzzSettings gives one setting by flag and by environment: both mean the same.
func FuzzSettings(f *testing.F) {
	for i, o := range executorOptions {
		f.Add(byte(i), o.value)
	}
	for _, v := range []string{"0-0", "1,2,5-9", "5-1", "1024", "99999999999999999999", "-1", "1e9KiB", "NaNKiB", "1.5GB", " 7 ", "auto", "+Inf",
		"1h1h", "shm,verbs,shm", "2030-01-02T03:04:05Z", "18446744073709551615", "\x00", "a\nb", "--help", "=", "''"} {
		for _, key := range []string{"cores", "memory", "grace", "providers", "until", "listen", "log-level"} {
			for i, o := range executorOptions {
				if o.key == key {
					f.Add(byte(i), v)
				}
			}
		}
	}
	f.Fuzz(func(t *testing.T, n byte, value string) {
		o := executorOptions[int(n)%len(executorOptions)]
		if o.key == "secret-file" { // completed after the settings, from the environment
			return
		}
		args := []string{"--" + o.key + "=" + value}
		byFlag, err := LoadExecutor(args, home, io.Discard, "v1")
		mustBeUsage(t, err)
		if o.value == "true" || o.value == "false" { // flags of their own kind
			return
		}
		if err == nil {
			valid(t, byFlag, args, home)
		}
		env := "RFAAS_EXECUTOR_" + strings.ToUpper(strings.ReplaceAll(o.key, "-", "_")) + "=" + value
		byEnv, eerr := LoadExecutor(nil, append([]string{env}, home...), io.Discard, "v1")
		mustBeUsage(t, eerr)
		if (err == nil) != (eerr == nil) || err == nil && !reflect.DeepEqual(byFlag, byEnv) {
			t.Errorf("%s = %q: by flag %v, by environment %v\n%+v\n%+v", o.key, value, err, eerr, byFlag, byEnv)
		}
	})
}
