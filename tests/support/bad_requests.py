"""Requests of clients that are wrong, and what the real SGLang does with them when nothing stands before it.

Found by sending it wrong values of every field it takes, one by one: tests/unit checks that the gateway refuses them,
tests/engine that the real engine is none the worse. Token ids are those of the tiny Kimi, whose vocabulary has 2048.
"""

from __future__ import annotations

from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ROUTES = (CHAT, COMPLETIONS)

Case = tuple[str, dict[str, Any]]

# The scheduler dies, and the whole server with it; of the last two rows only when other requests come at a bad time.
KILLERS: list[Case] = [
    *((route, {"logit_bias": {token: 1}}) for route in ROUTES for token in ("2048", "-1", "9" * 5000)),
    *((route, {"top_k": top_k}) for route in ROUTES for top_k in (2**31, 2**63, "3000000000", 1e10)),
    *(
        (route, {"stop_token_ids": [token], "min_tokens": 3})
        for route in ROUTES
        for token in (-1, 2049, "2049", 10**12)
    ),
    (CHAT, {"logprobs": True, "top_logprobs": 99999}),
    (CHAT, {"logprobs": True, "top_logprobs": -1}),
    *((CHAT, {"input_ids": ids}) for ids in ([-1], [2048], [5, "-1"], [-1.0])),
    (COMPLETIONS, {"prompt": "a", "logprobs": 2049}),
    *((COMPLETIONS, {"prompt": ids}) for ids in ([2048], [-5], [[1, 2], [3, -5]], [1, "-1"], [-1.0], [["-1"]])),
    *((COMPLETIONS, {"prompt": prompts}) for prompts in (["a", ""], ["", "a"], [[1], []])),
    *((route, {"stop_token_ids": [token]}) for route in ROUTES for token in (-1, 10**12)),
]

# Status 500, though only the client can do something about it; of the last stop_regex older releases die.
INTERNAL_ERRORS: list[Case] = [
    *(
        (route, {"stop_regex": pattern})
        for route in ROUTES
        for pattern in (
            "(((",
            "[",
            "*",
            "\\",
            "a{3,1}",
            "(?P<x>a)(?P<x>b)",
            "(a){4294967296}",
            ["a", "((("],
            "(?<=a*)b",
        )
    ),
    *((route, {"rid": rids}) for route in ROUTES for rids in ([], ["a"], ["a", "b"])),
    *((CHAT, {"chat_template_kwargs": {name: None}}) for name in ("messages", "tools", "add_generation_prompt")),
    *((CHAT, {"chat_template_kwargs": {name: True}}) for name in ("tokenize", "return_dict")),
    *((CHAT, {"response_format": wanted}) for wanted in (5, "json_object", [1])),
    *((CHAT, {"response_format": {"type": "json_schema", "schema": schema}}) for schema in (5, "x", [1])),
    *(
        (CHAT, {"response_format": {"type": "json_schema", "schema": {"properties": properties}}})
        for properties in (5, ["strict"], {"strict": True})
    ),
    (COMPLETIONS, {"prompt": ["x", "y"], "lora_path": ["a"]}),
    (COMPLETIONS, {"prompt": "x", "n": 2, "lora_path": []}),
]

# Status 500 once a token is refused: a grammar that has no way on.
_NOWHERE = "root ::= root"
_CIRCLE: dict[str, Any] = {"$ref": "#"}
DEAD_ENDS: list[Case] = [
    *((route, {"ebnf": grammar}) for route in ROUTES for grammar in (_NOWHERE, 'root ::= "a" x\nx ::= x')),
    *(
        (route, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}})
        for route in ROUTES
        for schema in (_CIRCLE, {"anyOf": [_CIRCLE]}, {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})
    ),
    *(
        (route, {"response_format": {"type": "structural_tag", "format": wanted}})
        for route in ROUTES
        for wanted in ({"type": "grammar", "grammar": _NOWHERE}, {"type": "json_schema", "json_schema": _CIRCLE})
    ),
    (COMPLETIONS, {"json_schema": '{"$ref": "#"}'}),
]
