# A page calls it by `. "$ROOT/tests/pages/framework.sh" NAME`. Its later blocks then find the framework NAME: in the
# environment of `make frameworks`, if PHALANX_FRAMEWORKS_VENV names one; else as installed; else a stand-in.
if [ -n "$PHALANX_FRAMEWORKS_VENV" ]; then
    printf '#!/bin/sh\nexec "%s/bin/python" -m phalanx "$@"\n' "$PHALANX_FRAMEWORKS_VENV" >bin/phalanx
    printf '#!/bin/sh\nexec "%s/bin/python" "$@"\n' "$PHALANX_FRAMEWORKS_VENV" >bin/python
    chmod +x bin/phalanx bin/python
elif ! python -c "import $1" 2>/dev/null; then
    cp -r "$ROOT/tests/pages/stand_ins/$1"* .
fi
