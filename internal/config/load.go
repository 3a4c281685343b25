package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/go-viper/mapstructure/v2"
	"github.com/hashicorp/go-multierror"
	"github.com/spf13/pflag"
	"github.com/spf13/viper"
)

// ErrUsage marks a wrong command line or wrong settings: exit code 2.
var ErrUsage = errors.New("usage")

// ErrDone means that the program has done what its flags asked for (--help, --version, --check-config,
// --print-config) and shall exit with 0.
var ErrDone = errors.New("done")

// option is one setting of a program.
type option struct {
	key   string
	value string // default, as text
	help  string
}

// program is what the loader needs to know of a program.
type program struct {
	name    string // of the executable
	about   string
	prefix  string // of environment variables, "RFAAS_EXECUTOR_"
	version string
	options []option
}

// settings are a program's.
type settings interface {
	validate() error // what they say
	here() error     // what they name on this machine
}

// load fills into (a pointer to the program's struct) from args and environ and validates it. Text that the flags
// ask for goes to out.
func (p program) load(args, environ []string, out io.Writer, into settings) error {
	flags := p.flags()
	if err := flags.Parse(args); err != nil {
		return fmt.Errorf("%w: %w (--help lists the flags)", ErrUsage, err)
	}
	wished := func(name string) bool { is, _ := flags.GetBool(name); return is }
	if wished("help") {
		fmt.Fprintf(out, "%s: %s\n\nUsage: %s [flags]\n\n%s\n%s\n", p.name, p.about, p.name, flags.FlagUsages(), p.otherSources())
		return ErrDone
	}
	if wished("version") {
		fmt.Fprintf(out, "%s %s\n", p.name, p.version)
		return ErrDone
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("%w: unexpected argument %q", ErrUsage, flags.Arg(0))
	}

	file, _ := flags.GetString("config")
	values, source, err := p.merge(flags, file, environ)
	// All that is wrong at once: what could not be read has its default for the checks that follow.
	wrong := multierror.Append(nil, err, p.decode(values, source, into), into.validate())
	if wished("check-config") {
		wrong = multierror.Append(wrong, into.here())
	}
	wrong.ErrorFormat = lines
	if wrong.Len() > 0 {
		return fmt.Errorf("%w: %w", ErrUsage, wrong)
	}
	switch {
	case wished("print-config"):
		p.print(out, values)
		return ErrDone
	case wished("check-config"):
		fmt.Fprintln(out, "the settings are good")
		return ErrDone
	}
	return nil
}

// flags is the command line, with nothing parsed yet.
func (p program) flags() *pflag.FlagSet {
	flags := pflag.NewFlagSet(p.name, pflag.ContinueOnError)
	flags.SortFlags = false
	flags.Usage = func() {}
	flags.SetOutput(io.Discard)
	flags.String("config", "", "settings file, YAML or TOML")
	flags.Bool("check-config", false, "check the settings, and whether this node has the files, devices, addresses, cores and memory that they name, and exit")
	flags.Bool("print-config", false, "print the resulting settings as YAML, and exit")
	flags.Bool("version", false, "print the version and exit")
	flags.BoolP("help", "h", false, "print this help and exit")
	for _, o := range p.options {
		if o.value == "true" || o.value == "false" {
			flags.Bool(o.key, o.value == "true", o.help)
		} else {
			flags.String(o.key, o.value, o.help)
		}
	}
	return flags
}

func (p program) otherSources() string {
	return fmt.Sprintf("You can also give a setting in the --config file under the same name, or in the\n"+
		"environment as %s and the name in capitals (%s).", p.prefix, p.envName("listen"))
}

// Usage has the texts of a program's manual page.
type Usage struct {
	Name, About string
	Sources     string // of settings besides flags: sentences
	Flags       *pflag.FlagSet
}

// Usages returns the programs whose settings this package reads.
func Usages() (all []Usage) {
	for _, p := range []program{executorProgram(""), managerProgram("")} {
		all = append(all, Usage{p.name, p.about, p.otherSources(), p.flags()})
	}
	return all
}

func (p program) envName(key string) string {
	return p.prefix + strings.ToUpper(strings.ReplaceAll(key, "-", "_"))
}

// merge puts the layers on top of each other. source says where each value came from, for error messages. What err complains
// of is left out.
func (p program) merge(flags *pflag.FlagSet, file string, environ []string) (values map[string]any, source map[string]string, err error) {
	values, source = map[string]any{}, map[string]string{}
	var wrong *multierror.Error
	for _, o := range p.options {
		values[o.key], source[o.key] = o.value, "default"
	}
	if file != "" {
		wrong = multierror.Append(wrong, readFile(file, values, source))
	}
	for _, kv := range environ {
		name, value, _ := strings.Cut(kv, "=")
		if o := p.withoutProgram(name); o >= 0 {
			wrong = multierror.Append(wrong, fmt.Errorf("environment: %s=%.80q: no program reads this name. The setting %s of %s is %s",
				name, value, p.options[o].key, p.name, p.envName(p.options[o].key)))
			continue
		}
		if !strings.HasPrefix(name, p.prefix) {
			continue
		}
		at := slices.IndexFunc(p.options, func(o option) bool { return name == p.envName(o.key) })
		if at < 0 {
			wrong = multierror.Append(wrong, fmt.Errorf("environment: %s=%.80q is not a setting (--help lists them)", name, value))
			continue
		}
		values[p.options[at].key], source[p.options[at].key] = value, name
	}
	flags.Visit(func(f *pflag.Flag) {
		if _, ok := values[f.Name]; ok {
			values[f.Name], source[f.Name] = f.Value.String(), "--"+f.Name
		}
	})
	return values, source, wrong.ErrorOrNil()
}

// clients lists the variables that client programs read and whose names look like those of a daemon's settings.
var clients = []string{"RFAAS_ALLOW_PLAINTEXT", "RFAAS_DATA_ENCRYPTION", "RFAAS_MANAGER", "RFAAS_OFI_DEVICE", "RFAAS_OFI_PROVIDER",
	"RFAAS_POOL", "RFAAS_SECRET_FILE"}

// withoutProgram returns the option that a variable such as RFAAS_CORES would set if its name contained that of the
// program, or -1.
func (p program) withoutProgram(name string) int {
	if !strings.HasPrefix(name, "RFAAS_") || slices.Contains(clients, name) {
		return -1
	}
	return slices.IndexFunc(p.options, func(o option) bool {
		return name == "RFAAS_"+strings.TrimPrefix(p.envName(o.key), p.prefix)
	})
}

// readFile puts what a settings file says into values, which has every key.
func readFile(file string, values map[string]any, source map[string]string) error {
	v := viper.New()
	v.SetConfigFile(file)
	if ext := filepath.Ext(file); ext != ".yaml" && ext != ".yml" && ext != ".toml" {
		return fmt.Errorf("settings file %s: the name must end in .yaml, .yml or .toml", file)
	}
	if err := v.ReadInConfig(); err != nil {
		return fmt.Errorf("settings file %s: %w", file, err)
	}
	var wrong *multierror.Error
	known := strings.Join(slices.Sorted(maps.Keys(values)), ", ")
	seen := map[string]bool{}
	for _, key := range slices.Sorted(slices.Values(v.AllKeys())) {
		if strings.HasPrefix(key, "runtimes.") { // the setting is a map
			key = "runtimes"
		}
		if seen[key] {
			continue
		}
		seen[key] = true
		if _, ok := values[key]; !ok {
			wrong = multierror.Append(wrong, fmt.Errorf("settings file %s: unknown key %q (known: %s)", file, key, known))
			continue
		}
		text, err := scalar(v.Get(key))
		if err != nil {
			wrong = multierror.Append(wrong, fmt.Errorf("settings file %s: %s %w", file, key, err))
			continue
		}
		values[key], source[key] = text, file
	}
	return wrong.ErrorOrNil()
}

// scalar is a file's value as the text that it would be as a flag, so that both mean the same: `grace: 5` lacks its unit
// and `grace: true` is not a duration.
func scalar(v any) (string, error) {
	switch v := v.(type) {
	case nil:
		return "", errors.New("has no value")
	case string:
		return v, nil
	case bool, int, int64, uint64:
		return fmt.Sprint(v), nil
	case float64:
		return strconv.FormatFloat(v, 'f', -1, 64), nil
	case time.Time:
		return v.Format(time.RFC3339Nano), nil
	case map[string]any:
		text, err := json.Marshal(v)
		return string(text), err
	}
	return "", fmt.Errorf("is %v: want one value", v)
}

// decode turns each value into its field's type, so that every error can name the setting and where it came from. A field
// whose value is none gets its default.
func (p program) decode(values map[string]any, source map[string]string, into any) error {
	var wrong *multierror.Error
	for _, o := range p.options {
		text, ok := values[o.key].(string)
		var err error
		if ok && (!utf8.ValidString(text) || strings.ContainsFunc(text, unicode.IsControl)) {
			err = fmt.Errorf("%s = %q (from %s): not a line of text", o.key, text, source[o.key])
		} else if err = decodeOne(o.key, values[o.key], into); err != nil {
			err = fmt.Errorf("%s = %v (from %s): %w", o.key, values[o.key], source[o.key], cause(err))
		}
		if err != nil {
			wrong = multierror.Append(wrong, err, decodeOne(o.key, o.value, into))
		}
	}
	return wrong.ErrorOrNil()
}

func decodeOne(key string, value, into any) error {
	d, err := mapstructure.NewDecoder(&mapstructure.DecoderConfig{
		Result:           into,
		WeaklyTypedInput: true,
		ErrorUnused:      true,
		DecodeHook: mapstructure.ComposeDecodeHookFunc(
			mapstructure.StringToTimeDurationHookFunc(),
			textHook,
		),
	})
	if err != nil {
		return err
	}
	return d.Decode(map[string]any{key: value})
}

// lines writes several errors one per line.
func lines(errs []error) string {
	var b strings.Builder
	for i, e := range errs {
		if i > 0 {
			b.WriteString("\n")
		}
		b.WriteString(e.Error())
	}
	return b.String()
}

// cause takes mapstructure's own prefix off, and says what a duration looks like.
func cause(err error) error {
	var de *mapstructure.DecodeError
	if errors.As(err, &de) {
		err = de.Unwrap()
	}
	if strings.HasPrefix(err.Error(), "time: ") { // of time.ParseDuration
		return fmt.Errorf("%w: want a number with its unit, like 500ms, 10s or 2h", err)
	}
	return err
}

func (p program) print(out io.Writer, values map[string]any) {
	for _, o := range p.options {
		text, err := json.Marshal(fmt.Sprint(values[o.key])) // a JSON string is a YAML string
		if err != nil {
			continue // a string always marshals
		}
		fmt.Fprintf(out, "# %s\n%s: %s\n", o.help, o.key, text)
	}
}

// Logger makes the program's logger. format is "text" or "json"; level as slog writes it.
func newLogger(w io.Writer, format string, level slog.Level) *slog.Logger {
	o := &slog.HandlerOptions{Level: level}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}
