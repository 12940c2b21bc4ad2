"""OpenAI's API: ``requests/`` has the schemas of bodies and what they ask for, ``generation/`` what
runs for one call, ``responses/`` the answers, ``endpoints/`` the routes and their description.

What a request consists of, from the HTTP call down to one continuation of one prompt::

    Call                    one HTTP call: its id, tenant and line in the access log
      Display               how its answer is shown; travels in every Submit, for the next gateway
        OutputOptions       which choices, tokens and scores are shown
      Generation            lifecycle: submit, attach, resume, accepted, close, abandon
        GenerationOutput    what is new by choice, usage, scores
          PromptRequest     one for each prompt: its Prompt, and the Submit that the engine gets
            Choice          one for each continuation: how far it has come
              ChoiceText    tokens in, text out, cut at a stop string

The engine's client follows each Submit in the outputs log and puts what becomes of it into the
event queue of its Generation. ``responses/answers.py`` sends the deltas of its choices to the
client; a Serializer, one for each format, turns them into bytes.
"""
