package handover

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// Version is the version of the state. A program reads only its own version. It must also be raised when the messages to the spawner change,
// because the spawner of the earlier program stays: it refuses a message of another length and ends all workers.
const Version = 4

// Env names the environment variable with the descriptor of the state.
const Env = "RFAAS_HANDOVER"

// readable is in every program that can take over. Readable looks for it in the file of the new program.
var readable = []byte("rfaas takes over executor state version \x04;")

const magic = "rfaas handover\n\x00"

// header is the beginning of the memory file: magic, version, length and SHA-256 of the state.
const header = len(magic) + 4 + 8 + sha256.Size

// stateMost bounds the state in bytes.
const stateMost = 1 << 30

// VersionError means that another version of the program has written the state.
type VersionError struct{ Got uint32 }

func (e *VersionError) Error() string {
	return fmt.Sprintf("the state has version %d, this program reads version %d", e.Got, Version)
}

// Program returns the path that this program was started with. An update puts the program that takes over there. Program must be
// called before the working directory changes.
func Program() string {
	if path := os.Args[0]; strings.Contains(path, "/") {
		if abs, err := filepath.Abs(path); err == nil {
			return abs // not resolved: an update may make a symbolic link point to the new program
		}
	}
	path, err := os.Executable()
	if err != nil {
		return os.Args[0]
	}
	return path
}

// Readable returns an error if the program at path cannot be executed, or does not read this version of the state.
func Readable(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil {
		return err
	} else if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", path)
	}
	if err := unix.Access(path, unix.X_OK); err != nil {
		return fmt.Errorf("%s cannot be executed: %w", path, err)
	}
	found, err := contains(f, readable)
	if err != nil {
		return err
	}
	if !found {
		return fmt.Errorf("%s does not take over executor state of version %d: restart the executor with a drain instead", path, Version)
	}
	return nil
}

// contains reports whether a file contains some bytes.
func contains(f io.Reader, what []byte) (bool, error) {
	buf := make([]byte, 1<<20)
	kept := 0 // bytes from the end of the last block, since what may begin there
	for {
		n, err := io.ReadFull(f, buf[kept:])
		if bytes.Contains(buf[:kept+n], what) {
			return true, nil
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		kept = copy(buf, buf[len(buf)-len(what)+1:])
	}
}

// encode returns the content of the memory file.
func encode(s *State) ([]byte, error) {
	body, err := proto.Marshal(s)
	if err != nil {
		return nil, err
	}
	b := make([]byte, 0, header+len(body))
	b = append(b, magic...)
	b = binary.LittleEndian.AppendUint32(b, Version)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(body)))
	sum := sha256.Sum256(body)
	return append(append(b, sum[:]...), body...), nil
}

// decode is the inverse of encode.
func decode(b []byte) (*State, error) {
	if len(b) < header || string(b[:len(magic)]) != magic {
		return nil, errors.New("this is not the state of an executor")
	}
	rest := b[len(magic):]
	if v := binary.LittleEndian.Uint32(rest); v != Version {
		return nil, &VersionError{v}
	}
	body := b[header:]
	if n := binary.LittleEndian.Uint64(rest[4:]); n != uint64(len(body)) {
		return nil, fmt.Errorf("the state has %d bytes, its header says %d", len(body), n)
	}
	if sha256.Sum256(body) != [sha256.Size]byte(rest[12:12+sha256.Size]) {
		return nil, errors.New("the state is damaged: its checksum is wrong")
	}
	s := &State{}
	if err := proto.Unmarshal(body, s); err != nil {
		return nil, fmt.Errorf("the state cannot be read: %w", err)
	}
	return s, nil
}

// Write returns a sealed memory file with the state.
func Write(s *State) (fd int, err error) {
	b, err := encode(s)
	if err != nil {
		return -1, err
	}
	if fd, err = unix.MemfdCreate("rfaas-handover", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING); err != nil {
		return -1, os.NewSyscallError("memfd_create", err)
	}
	for at := 0; at < len(b) && err == nil; {
		var n int
		n, err = unix.Pwrite(fd, b[at:], int64(at))
		at += n
	}
	if err == nil {
		const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE | unix.F_SEAL_SEAL
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("write the state: %w", err)
	}
	return fd, nil
}

// Take returns the state that the environment names, and the environment without it. The state is nil if there is none. The
// descriptors in it then close with the next execve, and belong to the caller.
func Take(environ []string) (*State, []string, error) {
	rest := make([]string, 0, len(environ))
	number := ""
	for _, kv := range environ {
		if value, ok := strings.CutPrefix(kv, Env+"="); ok {
			number = value
			continue
		}
		rest = append(rest, kv)
	}
	if number == "" {
		return nil, rest, nil
	}
	s, err := read(number)
	if err != nil {
		return nil, rest, fmt.Errorf("take over from the earlier program: %w", err)
	}
	return s, rest, nil
}

func read(number string) (*State, error) {
	fd, err := strconv.Atoi(number)
	if err != nil || fd < 3 {
		return nil, fmt.Errorf("%s=%q is not a descriptor", Env, number)
	}
	f := os.NewFile(uintptr(fd), "state")
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("%s=%s: %w", Env, number, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > stateMost {
		return nil, fmt.Errorf("%s=%s is not a state of at most %d bytes", Env, number, stateMost)
	}
	b := make([]byte, st.Size)
	if _, err := f.ReadAt(b, 0); err != nil {
		return nil, err
	}
	s, err := decode(b)
	if err != nil {
		return nil, err
	}
	for _, fd := range s.Descriptors() {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
			return nil, fmt.Errorf("descriptor %d of the state: %w", fd, err)
		}
	}
	return s, nil
}

// Descriptors returns the descriptors that the state names.
func (s *State) Descriptors() (fds []int) {
	add := func(list ...int32) {
		for _, fd := range list {
			if fd > 0 {
				fds = append(fds, int(fd))
			}
		}
	}
	add(s.GetControl().GetSocket(), s.GetWeb().GetSocket(), s.GetData().GetSocket(), s.GetStateDir(), s.GetBundlesLock(), s.GetSignals())
	add(s.GetSpawner().GetSocket(), s.GetSpawner().GetOutput())
	for _, l := range s.GetLibraries() {
		add(l.GetFile(), l.GetNamesFile())
	}
	for _, t := range s.GetTables() {
		add(t.GetFile())
	}
	for _, l := range s.GetLeases() {
		for _, seat := range l.GetSeats() {
			w := seat.GetWorker()
			add(w.GetSocket(), w.GetOutput(), w.GetPage())
			add(w.GetGroupFiles()...)
		}
	}
	return fds
}

// Exec replaces this program by the one at path, with the same arguments, by a function like syscall.Exec. It returns only after a failure. The
// caller must not rely on other goroutines from then on. Exec runs on the thread that has started the child processes: the kernel kills them
// when that thread ends, and execve ends all others.
func Exec(execve func(path string, args, environ []string) error, path string, args, environ []string, s *State) (err error) {
	state, err := Write(s)
	if err != nil {
		return err
	}
	defer unix.Close(state)
	wire.OnStarterThread(func() {
		fds := append(s.Descriptors(), state)
		if err = closeOnExec(fds, false); err == nil {
			err = execve(path, args, append(environ[:len(environ):len(environ)], Env+"="+strconv.Itoa(state)))
			err = &os.PathError{Op: "execve", Path: path, Err: err}
		}
		_ = closeOnExec(fds, true)
	})
	return err
}

func closeOnExec(fds []int, on bool) error {
	flag := 0
	if on {
		flag = unix.FD_CLOEXEC
	}
	for _, fd := range fds {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, flag); err != nil {
			return fmt.Errorf("keep descriptor %d: %w", fd, err)
		}
	}
	return nil
}

// Clock converts times between this process's time.Time and those of a state.
type Clock struct {
	now  time.Time
	mono int64
}

// NewClock reads both clocks.
func NewClock() Clock {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // cannot fail
	return Clock{time.Now(), ts.Nano()}
}

// Put returns a time of a state; 0 for the zero time.
func (c Clock) Put(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return c.mono + int64(t.Sub(c.now))
}

// Get is the inverse of Put.
func (c Clock) Get(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return c.now.Add(time.Duration(ns - c.mono))
}
