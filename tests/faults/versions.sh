#!/usr/bin/env bash
# The lower bounds of pyproject.toml, and the newest packages that there are, each in an environment
# of its own: whether a short part of the tests passes there. `versions.sh [oldest] [newest]`.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 MPLBACKEND=Agg PYTHONPATH=$PWD
TESTS=(
  tests/test_contract.py tests/test_dropin.py tests/test_resume.py tests/test_snapshots.py
  tests/test_predict.py tests/test_warmstart.py tests/test_plots.py
)
TOLD='^(jax|jaxlib|optax|flax|numpy|orbax-checkpoint|safetensors|arviz|chex)=='

# What users install, one requirement a line; with "==" for ">=" where the oldest is wanted.
requirements() {
  python3 - "$1" <<'PYTHON'
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
names = ("flax", "storage", "diagnostics", "arviz", "eval", "plots", "progress")
wanted = sum((extras[name] for name in names), project["dependencies"])
print(*(x.replace(">=", "==") if sys.argv[1] == "oldest" else x for x in wanted), sep="\n")
PYTHON
}

for age in ${@:-oldest newest}; do
  python3 -m venv "$work/$age"
  requirements "$age" > "$work/$age.txt"
  "$work/$age/bin/pip" install -qq --upgrade --upgrade-strategy eager \
    . -r "$work/$age.txt" pytest pytest-xdist hypothesis chex equinox grain
  echo "== $age: $("$work/$age/bin/pip" freeze | grep -E "$TOLD" | tr '\n' ' ')"
  # Packages of another time deprecate what is theirs.
  "$work/$age/bin/python" -m pytest -q -n 3 -p no:cacheprovider \
    -W default::DeprecationWarning "${TESTS[@]}"
done
