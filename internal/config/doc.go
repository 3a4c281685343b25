// Package config reads and checks the settings of the daemons: one validated struct per program.
//
// Every setting has one name, written the same way everywhere: `code-limit: 64MiB` in a file, --code-limit 64MiB as
// a flag, RFAAS_EXECUTOR_CODE_LIMIT=64MiB in the environment. Later ones win: defaults, then the file (--config,
// YAML or TOML), then the environment, then flags. An unknown key is an error. So is an environment variable that
// begins like these but names no setting, because a setting that is silently ignored is the hardest one to find.
package config
