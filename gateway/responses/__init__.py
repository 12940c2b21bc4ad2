"""The Responses API: answers that are kept, continued by their id, and finished in the background.

A response is a log in Redis: what was asked, the tokens, the end. Objects and events that clients
see are made from the tokens alone, whichever gateway reads them and however often, so the number
of an event is the same in every stream of it.

    request/                    what clients ask, and the chat that it becomes
    output_items, events        what clients get, from tokens
    records, store              what Redis keeps
    background_run, _jobs       finish what no client waits for
"""
