package agent

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"
)

// Settings are the settings of the program rfaas-agent.
type Settings struct {
	Socket    string        // path; empty: Listening is a listening socket
	Listening int           // descriptor
	Linger    time.Duration // 0: without a limit
	LogFile   string        // "-": standard error
	LogLevel  slog.Level
}

// SocketFD is the descriptor of the listening socket that a client passes to an agent that it starts. A flag can change it.
const SocketFD = 3

const (
	defaultLinger = 10 * time.Second
	envLinger     = "RFAAS_AGENT_LINGER"
	envLogLevel   = "RFAAS_AGENT_LOG_LEVEL"

	defaultLogLevel = "info"
)

// ErrDone means that the flags asked only for output, such as --version, and the program has to exit with 0.
var ErrDone = errors.New("done")

const about = `rfaas-agent: the control plane of all client processes of one user on one node.

The client library starts it when it is needed and passes a listening socket as descriptor 3. With --socket it runs as a
service: it makes the socket itself and stays. "rfaas agent status" and "rfaas agent stop" talk to it.

`

// flags returns the flags of the program, which set s and level.
func flags(s *Settings, level *string) *pflag.FlagSet {
	f := pflag.NewFlagSet("rfaas-agent", pflag.ContinueOnError)
	f.SortFlags = false
	f.SetOutput(io.Discard)
	f.StringVar(&s.Socket, "socket", "", "path of the socket to make and to listen on (default: none, see --listening)")
	f.IntVar(&s.Listening, "listening", SocketFD, "descriptor of a listening unix socket, unless --socket is given")
	f.DurationVar(&s.Linger, "linger", 0, "how long to stay without a client and without cached workers, 0 for ever (default: $"+envLinger+" or 10s; with --socket 0)")
	f.StringVar(&s.LogFile, "log-file", "", "log file, at most 1 MiB and as much of older lines in FILE.old; - for standard error (default: the socket's path with .log; with --socket -)")
	f.StringVar(level, "log-level", *level, "debug, info, warn or error")
	f.Bool("version", false, "print the version and exit")
	return f
}

// Usage returns what the program is, and its flags.
func Usage() (text string, f *pflag.FlagSet) {
	level := defaultLogLevel
	return strings.TrimSpace(about), flags(&Settings{}, &level)
}

// Parse reads the command line. For --help and --version it prints to out and returns ErrDone.
func Parse(args []string, getenv func(string) string, version string, out io.Writer) (Settings, error) {
	var s Settings
	level := cmp.Or(getenv(envLogLevel), defaultLogLevel)
	f := flags(&s, &level)
	help := f.BoolP("help", "h", false, "print this help and exit")
	if err := f.Parse(args); err != nil {
		return s, fmt.Errorf("%w (--help lists the flags)", err)
	}
	printVersion, _ := f.GetBool("version")
	switch {
	case *help:
		fmt.Fprintf(out, "%sUsage: rfaas-agent [flags]\n\n%s", about, f.FlagUsages())
		return s, ErrDone
	case printVersion:
		fmt.Fprintln(out, "rfaas-agent", version)
		return s, ErrDone
	case f.NArg() > 0:
		return s, fmt.Errorf("unexpected argument %q (--help lists the flags)", f.Arg(0))
	}
	if err := s.LogLevel.UnmarshalText([]byte(strings.ToUpper(level))); err != nil {
		return s, fmt.Errorf("--log-level: %q is not one of debug, info, warn, error", level)
	}
	if !f.Changed("linger") && s.Socket == "" {
		s.Linger = defaultLinger
		if v := getenv(envLinger); v != "" {
			d, err := time.ParseDuration(v)
			if err != nil {
				return s, fmt.Errorf("%s: %q is not a duration like 10s", envLinger, v)
			}
			s.Linger = d
		}
	}
	if s.Linger < 0 {
		return s, fmt.Errorf("--linger: %v is negative, want 0 for ever or a duration like 10s", s.Linger)
	}
	if s.LogFile == "" && s.Socket != "" {
		s.LogFile = "-"
	}
	return s, nil
}

// Open opens the socket that the settings name.
func (s *Settings) Open() (*Socket, error) {
	if s.Socket != "" {
		return Listen(s.Socket)
	}
	return Inherited(s.Listening)
}

// Logger opens the log.
func (s *Settings) Logger(socket *Socket, stderr io.Writer) (*slog.Logger, error) {
	w := stderr
	if s.LogFile != "-" {
		path := s.LogFile
		if path == "" {
			path = socket.path + ".log"
		}
		f, err := openLog(path)
		if err != nil {
			return nil, err
		}
		w = f
	}
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: s.LogLevel})), nil
}

// logMost bounds a log file, in bytes. The previous log file is kept too.
const logMost = 1 << 20

// logFile is a log of bounded size.
type logFile struct {
	path string

	mu   sync.Mutex
	f    *os.File
	size int64
}

func openLog(path string) (*logFile, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("log: %w", err)
	}
	l := &logFile{path: path}
	if err := l.open(); err != nil {
		return nil, fmt.Errorf("log: %w; choose another --log-file", err)
	}
	return l, nil
}

func (l *logFile) open() error {
	f, err := os.OpenFile(l.path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return err
	}
	l.f, l.size = f, st.Size()
	return nil
}

// Write writes one line.
func (l *logFile) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.size+int64(len(b)) > logMost {
		l.f.Close()
		_ = os.Rename(l.path, l.path+".old")
		if err := l.open(); err != nil {
			return 0, err
		}
	}
	n, err := l.f.Write(b)
	l.size += int64(n)
	return n, err
}
