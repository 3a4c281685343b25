package executor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/issuer"
	"github.com/rfaas-go/rfaas/internal/privilege"
	"github.com/rfaas-go/rfaas/internal/zygote"
)

// An executor that has given up root cannot write its identity directory. Its spawner then runs this program again as root, but without
// capabilities. That process reads only the directory and the issuer's replies. It writes one line, which is one of the words below and a time, or
// an error.
const (
	lineRenewed = "renewed"
	lineValid   = "valid"
	bare        = "bare" // last argument of the process without capabilities
)

// maxRenewalLine is the most that an executor reads of that line, in bytes.
const maxRenewalLine = 4 << 10

// IsRenewal reports whether a program's arguments ask for a renewal.
func IsRenewal(args []string) bool {
	return len(args) >= 3 && args[1] == zygote.RenewArgument
}

// RunRenewal is the program that the spawner runs. It returns the exit status.
func RunRenewal(ctx context.Context, args []string, stdout io.Writer) int {
	if len(args) == 3 {
		fmt.Fprintln(stdout, privilege.Bare(append(args, bare)))
		return 1
	}
	if err := privilege.Filter(); err != nil && !errors.Is(err, privilege.ErrArchitecture) {
		fmt.Fprintln(stdout, err)
		return 1
	}
	ends, renewed, err := issuer.Renew(ctx, args[2], issuer.AtFirst)
	if err != nil {
		fmt.Fprintln(stdout, err)
		return 1
	}
	word := lineValid
	if renewed {
		word = lineRenewed
	}
	fmt.Fprintln(stdout, word, ends.UTC().Format(time.RFC3339))
	return 0
}

// renewal returns a function that renews the certificate in the identity directory: by this process if it may write there, else by the spawner.
func renewal(dir string, s Spawner) issuer.RenewFunc {
	return func(ctx context.Context) (time.Time, bool, error) {
		if unix.Access(dir, unix.W_OK) == nil {
			return issuer.Renew(ctx, dir, issuer.AtFirst)
		}
		output, err := s.Renew()
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
			return time.Time{}, false, fmt.Errorf("%s: neither root nor the user of this executor alone can change the directory: chown it to one of them (a unit of systemd also needs ReadWritePaths=%s)", dir, dir)
		}
		if err != nil {
			return time.Time{}, false, err
		}
		defer output.Close()
		stop := context.AfterFunc(ctx, func() { output.SetReadDeadline(time.Unix(1, 0)) })
		defer stop()
		text, err := io.ReadAll(io.LimitReader(output, maxRenewalLine))
		if err != nil {
			return time.Time{}, false, err
		}
		return parseRenewal(string(text))
	}
}

// parseRenewal reads what RunRenewal writes.
func parseRenewal(text string) (ends time.Time, renewed bool, err error) {
	text = strings.TrimSpace(text)
	word, stamp, _ := strings.Cut(text, " ")
	if word == lineRenewed || word == lineValid {
		if ends, err = time.Parse(time.RFC3339, stamp); err == nil {
			return ends, word == lineRenewed, nil
		}
	}
	if text == "" {
		text = "the program that renews the certificate ended without a result"
	}
	return time.Time{}, false, errors.New(text)
}
