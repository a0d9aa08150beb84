"""Decorators written for debugging: those that surely change nothing go, all others are refused."""

from __future__ import annotations

import pytest

from tests.unit.serving.overlay.strip.conftest import Clean, Refused

WRAPPER = """import functools
def EAGLE3_DEBUG_trace(f):
    'Says when.'
    @functools.wraps(f)
    def g(*a, **k):
        {body}
    return g
"""
USE = "@EAGLE3_DEBUG_trace\ndef h(x):\n    return x\n"
PLAIN = "def h(x):\n    return x\n"
TRANSPARENT = {
    "a call and nothing else": "return f(*a, **k)",
    "a print before": "print(f.__name__, len(a))\n        return f(*a, **k)",
    "a time around": "t = time.time()\n        r = f(*a, **k)\n        print(time.time() - t)\n        return r",
    "a test that ends it": "if f.x:\n            return f(*a, **k)\n        print(1)\n        return f(*a, **k)",
}
CHANGING = {
    "another result": "return f(*a, **k) + 1",
    "a result changed in place": "r = f(*a, **k)\n        r.add_(1)\n        return r",
    "another value": "r = f(*a, **k)\n        r = 1\n        return r",
    "no result": "f(*a, **k)",
    "a result that only sometimes comes": "if k:\n            return 1\n        return f(*a, **k)",
    "a call twice": "r = f(*a, **k)\n        r = f(*a, **k)\n        return r",
    "a call twice in a print": "print(f(*a, **k))\n        return f(*a, **k)",
    "arguments left out": "return f(*a)",
    "arguments that are added": "return f(1, *a, **k)",
    "changed arguments": "k.pop('x')\n        return f(*a, **k)",
    "other arguments": "a = a[1:]\n        return f(*a, **k)",
    "a context": "with f.x:\n            return f(*a, **k)",
    "what is raised": "try:\n            return f(*a, **k)\n        except ValueError:\n            return None",
    "another function": "f = len\n        return f(*a, **k)",
    "an attribute": "f.calls = 1\n        return f(*a, **k)",
    "an unknown function": "g2(a)\n        return f(*a, **k)",
    "a generator": "return f(*a, **k)\n        yield",
}
ODD = {
    "fewer arguments": "def EAGLE3_DEBUG_trace(f):\n    def g(*a):\n        return f(*a) + 1\n    return g\n",
    "another function": "def EAGLE3_DEBUG_trace(f):\n    return len\n",
    "nothing": "def EAGLE3_DEBUG_trace(f):\n    print(f)\n",
    "sometimes none": "def EAGLE3_DEBUG_trace(f):\n    if f.x:\n        return None\n    return f\n",
    "a changed function": "def EAGLE3_DEBUG_trace(f):\n    f.x = 1\n    return f\n",
    "a registered function": "def EAGLE3_DEBUG_trace(f):\n    register(f)\n    return f\n",
    "a class": "class EAGLE3_DEBUG_trace:\n    def __init__(self, f):\n        self.f = f\n",
    "a coroutine": "def EAGLE3_DEBUG_trace(f):\n    async def g(*a, **k):\n        return f(*a, **k)\n    return g\n",
    "two meanings": "def EAGLE3_DEBUG_trace(f):\n    return f\ndef EAGLE3_DEBUG_trace(f):\n    return len\n",
    "a decorated one": "@other\ndef EAGLE3_DEBUG_trace(f):\n    return f\n",
}


@pytest.mark.parametrize("body", TRANSPARENT.values(), ids=TRANSPARENT)
def test_a_wrapper_that_only_looks_and_hands_over_goes_with_its_uses(clean: Clean, body: str) -> None:
    imports = "import time\n" if "time" in body else ""
    assert clean(imports + WRAPPER.format(body=body) + USE) == PLAIN


@pytest.mark.parametrize("body", CHANGING.values(), ids=CHANGING)
def test_a_wrapper_that_does_more_is_refused(refused: Refused, body: str) -> None:
    text = WRAPPER.format(body=body) + USE
    line = text[: text.index(USE)].count("\n") + 1
    message = refused(text)
    assert f"file.py:{line}: the decorator EAGLE3_DEBUG_trace may change what it decorates (line " in message


@pytest.mark.parametrize("definition", ODD.values(), ids=ODD)
def test_a_decorator_that_gives_something_else_is_refused(refused: Refused, definition: str) -> None:
    assert "the decorator EAGLE3_DEBUG_trace may change what it decorates" in refused(definition + USE)


def test_a_decorator_that_returns_what_it_is_given_goes_from_classes_too(clean: Clean) -> None:
    decorator = "def EAGLE3_DEBUG_see(f):\n    print(f.__name__)\n    return f\n"
    assert clean(f"{decorator}@EAGLE3_DEBUG_see\nclass A:\n    x = 1\n") == "class A:\n    x = 1\n"


FACTORY = """def EAGLE3_DEBUG_trace(name):
    def decorate(f):
        def g(self, *a, **k):
            print(name)
            return f(self, *a, **k)
        return g
    return decorate
"""


def test_a_factory_of_such_decorators_goes_if_its_arguments_only_look(clean: Clean, refused: Refused) -> None:
    method = "class A:\n    {}def h(self, x):\n        return x\n"
    text = FACTORY + method
    assert clean(text.format("@EAGLE3_DEBUG_trace('h')\n    ")) == method.format("")
    assert "next() is not known" in refused(text.format("@EAGLE3_DEBUG_trace(next(it))\n    "))


@pytest.mark.parametrize(
    ("decorated", "reason"),
    [
        ("@EAGLE3_DEBUG_trace\nclass A:\n    pass\n", "a plain function takes the place of what is none"),
        ("@EAGLE3_DEBUG_trace\nasync def h():\n    pass\n", "a plain function takes the place of what is none"),
        ("@EAGLE3_DEBUG_trace\n@staticmethod\ndef h():\n    pass\n", "staticmethod below it may make something else"),
        ("@register\n@EAGLE3_DEBUG_trace\ndef h():\n    pass\n", "the other decorators see another name"),
    ],
)
def test_a_wrapper_around_what_it_cannot_stand_in_for_is_refused(refused: Refused, decorated: str, reason: str) -> None:
    trace = "def EAGLE3_DEBUG_trace(f):\n    def g(*a, **k):\n        return f(*a, **k)\n    return g\n"
    assert reason in refused(trace + decorated)


def test_the_debug_layers_own_decorator_goes_unless_its_name_means_something_else_too(
    clean: Clean, refused: Refused
) -> None:
    text = "from eagle3_serve.runtime import debug as eagle3_serve_debug  # EAGLE3_DEBUG\n"
    use = '@eagle3_serve_debug.watch("target")  # EAGLE3_DEBUG\ndef h(x):\n    return x\n'
    assert clean(text + use) == PLAIN
    assert "may change what it decorates" in refused(f"{text}eagle3_serve_debug = other\n{use}")
    assert "may change what it decorates" in refused(text + use.replace("watch", "describe"))
