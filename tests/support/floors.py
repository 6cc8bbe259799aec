"""Floors of the package and rooms of backends, lower ones first: a module imports from its own and from those below."""

FLOORS = (
    {"_version", "errors", "embedded", "accelerator"},
    {"files", "tree", "native", "triton"},
    {"rng", "progress", "peak"},
    {"grammar_compile", "grammar_check"},
    {"draft", "bad_words", "sampling", "grammar", "heads", "models"},
    {"functional", "reasoning", "reference", "provenance", "results"},
    {"verifiers", "finish", "theory"},
    {"stoppers", "backends"},
    {"drafters"},
    {"engine"},
    {"testing", "training"},
    {"audit", "bench"},
    {"reproduction", "profiling", "server", "batch", "integrations"},
    {"cli"},
    {"__main__"},
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
# The rooms of backends; "" is the contract.
ROOMS = (
    {""},
    {"cache"},
    {"translation"},
    {"recurrent", "products"},
    {"hf"},
    {"lean"},
    {"heads"},
    {"heads.published"},
    {"loading"},
)
ROOM = {name: floor for floor, names in enumerate(ROOMS) for name in names}
