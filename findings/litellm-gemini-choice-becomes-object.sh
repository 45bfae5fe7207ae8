#!/bin/sh
# litellm 1.110.2: on the way to Gemini, an argument that is one of two words becomes an object.
#
# One would expect: {"enum": ["low", "high"]} says which values there are, so `type` can be left out, as JSON Schema's own
# documents do. A converter derives "string" from the values, as it must write a type for Gemini; or it says that it cannot.
# What happens: the type becomes "object", and the values go; of {"const": "low"} and alternatives of `const`, too. The
# model is asked for an object where a word belongs, and no call of the tool can be right. With "type": "string" beside
# it, the same choice arrives whole.
#
# Prints the version, and what Gemini is asked for. Exits with 1 when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check litellm==1.110.2
LITELLM_LOCAL_MODEL_COST_MAP=True "$folder/venv/bin/python" - <<'PY'
import importlib.metadata

from litellm.utils import get_optional_params

WORDS = ["low", "high"]


def asked(choice):
    parameters = {"type": "object", "properties": {"level": choice}, "required": ["level"]}
    tool = {"type": "function", "function": {"name": "set_level", "description": "Sets it.", "parameters": parameters}}
    sent = get_optional_params(model="gemini-2.5-pro", custom_llm_provider="gemini", tools=[tool])
    (declaration,) = sent["tools"][0]["function_declarations"]
    print(f"{choice} arrives as {declaration['parameters']['properties']['level']}")
    return declaration["parameters"]["properties"]["level"]


print("litellm", importlib.metadata.version("litellm"))
lost = {"type": "object"}
same = (
    asked({"enum": WORDS}) == lost
    and asked({"const": "low"}) == lost
    and asked({"anyOf": [{"const": word} for word in WORDS]}) == {"anyOf": [lost, lost]}
    and asked({"type": "string", "enum": WORDS}) == {"type": "string", "enum": WORDS}
)
print("choices without a type become objects" if same else "this has changed")
raise SystemExit(0 if same else 1)
PY
