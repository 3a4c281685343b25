# shellcheck shell=bash
# Common parts of scripts/softroce: the cached image, the work directory, and a virtual machine's life.
#
# A machine is known by a short name ("vm", or "a" and "b"). Its life is
#     vm_new NAME; vm_job NAME -- CMD ARGS...; vm_boot NAME; vm_wait NAME...; vm_result NAME
# and everything it owns is under $WORK/NAME:
#     ctl/        shared with the guest: config, job, tty in; stdout, stderr, status out
#     console     the kernel's console
#     qemu.log    messages of qemu itself
# WORK is one directory per run, locked during the run, so that a later run recognizes the directories of dead ones.

SOFTROCE_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
SOFTROCE_BUILD=${SOFTROCE_BUILD:-$SOFTROCE_DIR/../../build/softroce}

# Exit statuses of these scripts. A command may end with the same numbers. Only these statuses come with a message on stderr that
# starts with "softroce:".
# shellcheck disable=SC2034
readonly EXIT_TIMEOUT=124 EXIT_SETUP=125

say() { printf 'softroce: %s\n' "$*" >&2; }
die() {
	say "$*"
	exit "$EXIT_SETUP"
}

# need TOOL...: ends with a message if one is missing.
need() {
	local tool
	for tool in "$@"; do
		command -v "$tool" >/dev/null 2>&1 ||
			PATH=$PATH:/usr/sbin:/sbin command -v "$tool" >/dev/null 2>&1 ||
			die "$tool is missing: install the packages listed in $SOFTROCE_DIR/packages"
	done
}

# sh_quote WORD: the word, quoted for any POSIX shell.
sh_quote() { printf "'%s'" "${1//\'/\'\\\'\'}"; }

# -------------------------------------------------------------------------------------------- options

wrong() {
	say "$* (see --help)"
	exit 2
}

positive() { [[ $2 =~ ^[1-9][0-9]*$ ]] || wrong "$1 needs a positive whole number, not '$2'"; }

# The options that a machine reads, with their defaults; shellcheck cannot see the readers in other files.
# shellcheck disable=SC2034
TIMEOUT=600 MEMORY=2048 CPUS=2 CONSOLE='' HOSTNAME_WANTED='' STDIN=0 NO_TTY=0 TTY=0 MERGE=0
OUTPUTS=()     # absolute directories
ENVIRONMENT=() # NAME=VALUE
REST=()        # what follows the options, without their "--"

# options_parse ARGS...: sets the above. The caller's `usage` prints the help.
# shellcheck disable=SC2034
options_parse() {
	while (($# > 0)); do
		case $1 in
		--)
			shift
			break
			;;
		--help | -h)
			usage
			exit 0
			;;
		--*=*)
			set -- "${1%%=*}" "${1#*=}" "${@:2}"
			continue
			;;
		-e | --output | --timeout | --memory | --cpus | --console | --hostname)
			(($# > 1)) || wrong "$1 needs a value"
			;;
		--stdin | --no-tty) ;;
		-*) wrong "unknown option $1" ;;
		*) break ;;
		esac
		case $1 in
		--stdin) STDIN=1 ;;
		--no-tty) NO_TTY=1 ;;
		*)
			option_value "$1" "$2"
			shift
			;;
		esac
		shift
	done
	REST=("$@")
}

# shellcheck disable=SC2034
option_value() {
	case $1 in
	-e) option_variable "$2" ;;
	--output)
		mkdir -p -- "$2" || die "cannot make $2"
		OUTPUTS+=("$(cd -- "$2" && pwd -P)")
		;;
	--timeout) positive "$1" "$2" && TIMEOUT=$2 ;;
	--memory) positive "$1" "$2" && MEMORY=$2 ;;
	--cpus) positive "$1" "$2" && CPUS=$2 ;;
	--console)
		: >"$2" || die "cannot write $2"
		CONSOLE=$(cd -- "$(dirname -- "$2")" && pwd -P)/${2##*/}
		;;
	--hostname) HOSTNAME_WANTED=$2 ;;
	esac
}

option_variable() {
	local name=${1%%=*}
	[[ $name =~ ^[A-Za-z_][A-Za-z_0-9]*$ ]] || wrong "-e needs NAME=VALUE or NAME, not '$1'"
	if [[ $1 == *=* ]]; then
		ENVIRONMENT+=("$1")
	elif [[ -v $name ]]; then
		ENVIRONMENT+=("$name=${!name}")
	fi
}

# base_environment NAME: sets BASE to the environment of every command in machine NAME. -e takes precedence over it.
base_environment() {
	local name
	BASE=(PATH="$PATH" HOME="${HOME:-/}" SOFTROCE_DEVICE=rxe0 SOFTROCE_GID_INDEX=1
		SOFTROCE_ADDRESS="${VM_ADDRESS[$1]}")
	for name in USER LOGNAME SHELL LANG TERM; do
		if [[ -v $name ]]; then BASE+=("$name=${!name}"); fi
	done
}

# ---------------------------------------------------------------------------------------------- image

# image_key: a name for the initramfs that depends on its contents, apart from the kernel.
image_key() {
	cat -- "$SOFTROCE_DIR/image" "$SOFTROCE_DIR"/guest/* "$(command -v busybox)" | sha256sum | cut -c1-16
}

# image_find: sets KERNEL and INITRAMFS if the cache holds a current image.
image_find() {
	local current key
	current=$(readlink -f -- "$SOFTROCE_BUILD/current") || return 1
	key=$(image_key)
	KERNEL=$current/kernel
	INITRAMFS=$current/initramfs-$key
	MODULES=$current/modules
	[[ -s $KERNEL && -s $INITRAMFS && -d $MODULES ]]
}

image_ensure() {
	need qemu-system-x86_64 busybox setpriv flock rdma
	if ! image_find; then
		"$SOFTROCE_DIR/image" >&2 || die "could not make the image"
		image_find || die "scripts/softroce/image made no image in $SOFTROCE_BUILD"
	fi
	clock_option
}

# clock_option: sets CLOCK to the kernel option with the frequency of the machines' time stamp counter. A machine that measures it
# by itself on a busy processor may get half or twice the frequency, and its clock is then wrong. Without a C compiler CLOCK stays
# empty, and the machine measures.
CLOCK=''
clock_option() {
	local program=$SOFTROCE_BUILD/tsc khz
	if [[ ! -x $program || $program -ot $SOFTROCE_DIR/tsc.c ]]; then
		[[ $(uname -m) == x86_64 ]] && command -v cc >/dev/null || return 0
		cc -O1 -o "$program.$$" "$SOFTROCE_DIR/tsc.c" && mv -- "$program.$$" "$program" || return 0
	fi
	khz=$("$program") && [[ $khz =~ ^[1-9][0-9]{5,7}$ ]] || return 0
	CLOCK=tsc_early_khz=$khz
}

# ----------------------------------------------------------------------------------- work directory

WORK=
declare -A VM_PID=() VM_TAILS=() VM_NET=() VM_ADDRESS=() VM_PEER=() VM_HOSTNAME=()
TIMER_PID=
TTY_STATE=

work_new() {
	local old lock parent=${TMPDIR:-/tmp}
	# Removes directories of runs that were killed by SIGKILL: their lock is free.
	for old in "$parent"/softroce.??????????; do
		[[ -O $old && -f $old/lock ]] || continue
		exec {lock}<"$old/lock" || continue
		if flock -n "$lock"; then rm -rf -- "$old"; fi
		exec {lock}<&-
	done
	WORK=$(mktemp -d "$parent/softroce.XXXXXXXXXX")
	WORK=$(cd -- "$WORK" && pwd -P)
	trap work_cleanup EXIT
	trap 'exit 129' HUP
	trap 'exit 130' INT
	trap 'exit 143' TERM
	exec {WORK_LOCK}>"$WORK/.lock"
	flock -n "$WORK_LOCK"
	mv -- "$WORK/.lock" "$WORK/lock" # only a locked file ever has the name that the sweep looks for
	if [[ -t 0 ]]; then TTY_STATE=$(stty -g) || TTY_STATE=; fi
}

work_cleanup() {
	local pid
	trap '' HUP INT TERM
	set +e
	for pid in "${VM_PID[@]}" $TIMER_PID; do kill -KILL "$pid" 2>/dev/null; done
	for pid in "${VM_PID[@]}" $TIMER_PID; do wait "$pid" 2>/dev/null; done
	# shellcheck disable=SC2048 # each entry is a list of process ids
	for pid in ${VM_TAILS[*]}; do
		kill -KILL "$pid" 2>/dev/null
		wait "$pid" 2>/dev/null
	done
	if [[ -n $TTY_STATE ]]; then stty "$TTY_STATE" 2>/dev/null; fi
	if [[ -n $WORK ]]; then rm -rf -- "$WORK"; fi
}

# guarded CMD...: runs CMD so that it dies with this shell, however this shell dies, and does not keep
# the work directory's lock. Use it with `&`.
guarded() {
	exec {WORK_LOCK}>&-
	exec setpriv --pdeathsig KILL -- "$@"
}

# --------------------------------------------------------------------------------- virtual machine

# vm_new NAME: makes the directory of a machine, with the defaults of a single machine.
vm_new() {
	local name=$1
	mkdir -p -- "$WORK/$name/ctl"
	VM_TAILS[$name]=
	: >"$WORK/$name/ctl/stdout"
	: >"$WORK/$name/ctl/stderr"
	: >"$WORK/$name/console"
	VM_ADDRESS[$name]=10.77.0.2
	VM_PEER[$name]=
	VM_HOSTNAME[$name]=softroce-$name
	VM_NET[$name]=user,restrict=on,ipv6=off
}

# vm_job NAME CWD ENV... -- CMD ARGS...: sets the command of the guest. ENV is NAME=VALUE.
vm_job() {
	local name=$1 cwd=$2 word
	shift 2
	{
		printf 'cd -- %s || exit 125\n' "$(sh_quote "$cwd")"
		# Processes that a shell starts by "&" ignore these two signals.
		printf 'exec /usr/bin/env -i --default-signal=INT,QUIT'
		while (($# > 0)) && [[ $1 != -- ]]; do
			printf ' %s' "$(sh_quote "$1")"
			shift
		done
		shift
		for word in "$@"; do printf ' %s' "$(sh_quote "$word")"; done
		printf '\n'
	} >"$WORK/$name/ctl/job"
}

# vm_boot NAME: starts the machine. Reads the options TTY, MERGE, MEMORY, CPUS, OUTPUTS and the VM_ tables.
vm_boot() {
	local name=$1 dir=$WORK/$1 number=0 output size
	local -a args
	{
		printf 'GUEST_HOSTNAME=%s\n' "$(sh_quote "${VM_HOSTNAME[$name]}")"
		printf 'GUEST_ADDRESS=%s\n' "$(sh_quote "${VM_ADDRESS[$name]}")"
		printf 'GUEST_PEER=%s\n' "$(sh_quote "${VM_PEER[$name]}")"
		printf 'GUEST_MODULES=%s\n' "$(sh_quote "$(readlink -f -- "$MODULES")")"
		printf 'GUEST_MERGE=%s\n' "${MERGE:-0}"
		printf 'GUEST_TIMEOUT=%s\n' "$TIMEOUT"
		if [[ ${TTY:-0} == 1 ]]; then
			size=$(stty size)
			printf 'GUEST_TTY=%s\n' "$(sh_quote "$size")"
		else
			printf 'GUEST_TTY=\n'
		fi
		printf 'GUEST_OUTPUTS=%s\n' "${#OUTPUTS[@]}"
		for output in "${OUTPUTS[@]}"; do
			printf 'GUEST_OUTPUT_%d=%s\n' "$number" "$(sh_quote "$output")"
			number=$((number + 1))
		done
	} >"$dir/ctl/config"

	# shellcheck disable=SC2054 # the commas are qemu's
	args=(
		-no-user-config -nodefaults -display none -no-reboot
		-machine "pc,usb=off,vmport=off" -accel tcg,thread=multi -cpu max,la57=off # page tables of five levels cost a tenth of the time
		-smp "$CPUS" -m "$MEMORY"
		-kernel "$KERNEL" -initrd "$INITRAMFS"
		-append "console=ttyS0 quiet panic=-1 oops=panic softlockup_panic=1 watchdog_thresh=60 hung_task_panic=1 tsc=reliable clocksource=tsc $CLOCK mitigations=off random.trust_cpu=on net.ifnames=0"
		-chardev "file,id=console,path=$(qemu_quote "$dir/console")" -serial chardev:console
		-netdev "${VM_NET[$name]},id=net0" -device "virtio-net-pci,netdev=net0,romfile=,mac=52:54:00:77:00:0${VM_ADDRESS[$name]##*.}"
		-virtfs "local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap"
		-virtfs "local,path=$(qemu_quote "$dir/ctl"),mount_tag=ctl,security_model=none"
	)
	number=0
	for output in "${OUTPUTS[@]}"; do
		args+=(-virtfs "local,path=$(qemu_quote "$output"),mount_tag=output$number,security_model=none,multidevs=remap")
		number=$((number + 1))
	done
	if [[ ${TTY:-0} == 1 ]]; then
		args+=(-chardev "stdio,id=tty,signal=off" -serial chardev:tty)
		guarded qemu-system-x86_64 "${args[@]}" <&0 2>"$dir/qemu.log" &
	else
		guarded qemu-system-x86_64 "${args[@]}" </dev/null >"$dir/qemu.log" 2>&1 &
	fi
	VM_PID[$name]=$!
}

# qemu_quote PATH: a path inside one of qemu's comma-separated options.
qemu_quote() { printf '%s' "${1//,/,,}"; }

# vm_stream NAME [PREFIX]: passes on the guest's output until the machine has ended. Each line starts with PREFIX.
vm_stream() {
	local name=$1 prefix=${2:-}
	stream_follow "$name" stdout "$prefix"
	if ((MERGE == 0)); then stream_follow "$name" stderr "$prefix" >&2; fi
}

stream_follow() {
	local dir=$WORK/$1
	# tail waits for inotify. It checks the machine only after 0.1 s without output.
	local -a follow=(tail -c +1 -s 0.1 --pid="${VM_PID[$1]}" -f "$dir/ctl/$2")
	if [[ -z $3 ]]; then
		guarded "${follow[@]}" </dev/null &
		VM_TAILS[$1]+=" $!"
		return
	fi
	mkfifo -- "$dir/$2"
	guarded "${follow[@]}" </dev/null >"$dir/$2" &
	VM_TAILS[$1]+=" $!"
	guarded sed -u "s/^/$3/" <"$dir/$2" &
	VM_TAILS[$1]+=" $!"
}

# vm_timer SECONDS: starts the clock for vm_wait.
vm_timer() {
	guarded sleep "$1" </dev/null >/dev/null 2>&1 &
	TIMER_PID=$!
}

# vm_wait NAME...: returns when all machines have ended (0), the time is over (1), or the reader of the output is gone (2). In
# cases 1 and 2 it ends the machines.
vm_wait() {
	local name ended pid running why=0
	running=$#
	while ((running > 0)); do
		ended=
		wait -n -p ended || true
		[[ -n $ended ]] || break # no child is left
		if [[ $ended == "$TIMER_PID" ]]; then
			TIMER_PID=
			why=1
			break
		fi
		for name in "$@"; do
			if [[ $ended == "${VM_PID[$name]:-}" ]]; then
				running=$((running - 1))
				unset "VM_PID[$name]"
				continue 2
			fi
		done
		# A tail ends before its machine only if it cannot write.
		for name in "$@"; do
			if [[ " ${VM_TAILS[$name]:-} " == *" $ended "* && -n ${VM_PID[$name]:-} ]] && kill -0 "${VM_PID[$name]}" 2>/dev/null; then
				why=2
				break 2
			fi
		done
	done
	for name in "$@"; do
		pid=${VM_PID[$name]:-}
		if [[ -n $pid ]]; then
			kill -KILL "$pid" 2>/dev/null || true
			wait "$pid" 2>/dev/null || true
			unset "VM_PID[$name]"
		fi
		for pid in ${VM_TAILS[$name]:-}; do wait "$pid" 2>/dev/null || true; done
		unset "VM_TAILS[$name]"
	done
	if [[ -n $TIMER_PID ]]; then
		kill -KILL "$TIMER_PID" 2>/dev/null || true
		wait "$TIMER_PID" 2>/dev/null || true
		TIMER_PID=
	fi
	return "$why"
}

# vm_result NAME: sets STATUS to the command's exit status; 1 if the machine ended without one.
vm_result() {
	local file=$WORK/$1/ctl/status
	STATUS=
	if [[ -s $file ]]; then STATUS=$(<"$file"); fi
	[[ $STATUS =~ ^[0-9]+$ ]]
}

# vm_autopsy NAME: prints why a machine did not complete its job.
vm_autopsy() {
	local dir=$WORK/$1
	if [[ -s $dir/ctl/stage ]]; then say "machine $1 was at: $(<"$dir/ctl/stage")"; fi
	if [[ -s $dir/ctl/failed ]]; then say "machine $1: $(<"$dir/ctl/failed")"; fi
	if [[ -s $dir/ctl/report ]]; then
		say "processes and their kernel stacks, shortly before the end:"
		head -n 300 -- "$dir/ctl/report" >&2
	fi
	if [[ -s $dir/qemu.log ]]; then
		say "qemu said:"
		tail -n 20 -- "$dir/qemu.log" >&2
	fi
	say "end of the console of machine $1:"
	tail -n 40 -- "$dir/console" | tr -d '\r' >&2
	say "(end)"
}
