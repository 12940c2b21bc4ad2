"""Every hostile behaviour, with its rate.

All of them together need about one core of the gateways where nothing bounds them, so that
two cores have time left to serve others.
"""

from collections.abc import Sequence

from tests.chaos.hostile import bodies, connections
from tests.chaos.hostile.attacker import Attack

ATTACKS: Sequence[Attack] = (
    # What is asked for costs more than it should.
    Attack("many choices with stop strings", bodies.many_choices_with_stops, 4.0),
    Attack("some choices with stop strings", bodies.some_choices_with_stops, 6.0),
    Attack("echo with scores", bodies.echo_with_scores, 2.0, lanes=2),
    Attack("prompt scores", bodies.prompt_scores, 5.0),
    Attack("long log-probabilities", bodies.long_logprobs, 2.0, lanes=2),
    Attack("chat of many parts", bodies.many_parts, 10.0),
    Attack("unknown fields", bodies.unknown_fields, 8.0),
    Attack("unknown fields in messages", bodies.unknown_fields_in_messages, 8.0),
    Attack("deep JSON", bodies.deep_json, 8.0),
    Attack("over-long text", bodies.over_long_text, 10.0),
    Attack("token texts", bodies.token_texts, 12.0),
    Attack("unread token texts", bodies.unread_token_texts, 6.0, lanes=3),
    Attack("many tokens to text", bodies.many_tokens_to_text, 12.0),
    Attack("gzip body", bodies.gzip_body, 5.0),
    # What is asked for takes the engine from others.
    Attack("extreme priority", bodies.extreme_priority, 1.0, lanes=2),
    Attack("widest request", bodies.widest_request, 6.0),
    Attack("widest beam search", bodies.widest_beams, 6.0),
    Attack("long prompts", bodies.long_prompts, 15.0),
    Attack("pool-sized prompts", bodies.pool_sized_prompts, 5.0),
    # What is asked for is not what it seems.
    Attack("control tokens", bodies.control_tokens, 2.0, is_honest=True),
    Attack("crafted salt", bodies.crafted_salt, 1.0),
    Attack("tiny temperature", bodies.tiny_temperature, 2.0),
    Attack("extreme numbers", bodies.extreme_numbers, 0.5),
    Attack("Python's literals", bodies.pythons_literals, 2.0),
    Attack("wrong stream ids", bodies.wrong_stream_ids, 2.0),
    Attack("idempotency keys", bodies.idempotency_keys, 0.5, lanes=4),
    # How it is sent and read.
    Attack("idle connections", connections.idle_connections, 5.0, lanes=4),
    Attack("POSTs without bodies", connections.posts_without_bodies, 5.0, lanes=2),
    Attack("trickled bodies", connections.trickled_bodies, 1.0, lanes=8),
    Attack("trickled heads", connections.trickled_head, 1.0, lanes=8),
    Attack("upgrade to HTTP/2", connections.upgrade_to_http2, 2.0, is_honest=True),
    Attack("malformed HTTP", connections.malformed, 0.3),
    Attack("random bytes", connections.random_bytes, 0.3),
    Attack("half-closed", connections.half_closed, 2.0, is_honest=True),
    Attack("pipelined", connections.pipelined, 12.0),
    Attack("early leaver", connections.early_leaver, 0.3, lanes=3),
    Attack("slow reader", connections.slow_reader, 0.5, lanes=4),
    Attack("wrong keys", connections.wrong_keys, 0.5),
    Attack("costly pages", connections.costly_pages, 1.0),
)
