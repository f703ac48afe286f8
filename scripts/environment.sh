# Sourced by the two commands: finds a Python, makes a virtual environment, fills it once.

# find_python CONDITION NAME...: the first interpreter that has a venv module and whose version meets the condition.
find_python() {
    local condition=$1 name
    shift
    for name in "$@"; do
        if "$name" -c "import ensurepip, sys, venv; sys.exit(not sys.version_info[:2] $condition)" 2>/dev/null; then
            printf '%s\n' "$name"
            return
        fi
    done
    echo "$0: needs a Python $condition with its venv module; none of these is one: $*." \
        "Install it, or set PYTHON to its path." >&2
    return 3
}

# environment FOLDER PYTHON FILE... -- FILL: runs the function FILL with the environment's python, unless the environment
# was filled from these very files before.
environment() {
    local folder=$1 python=$2 stamp files=()
    shift 2
    while [ "$1" != -- ]; do files+=("$1"); shift; done
    stamp=$(cat "${files[@]}" | cksum; "$python" --version; pwd)
    [ "$(cat "$folder/filled-from" 2>/dev/null)" = "$stamp" ] && return
    echo "setting up $folder with $("$python" --version): a few minutes, once" >&2
    rm -rf "$folder"
    "$python" -m venv "$folder"
    "$2" "$folder/bin/python"
    printf '%s\n' "$stamp" >"$folder/filled-from"
}

# install PYTHON ARGUMENT...: pip, quiet but for errors.
install() {
    local python=$1
    shift
    "$python" -m pip install -qq --disable-pip-version-check --no-input "$@" || {
        echo "$0: pip install $* failed" >&2
        return 3
    }
}
