"""OpenAI's API: the schemas of requests and responses, validation, serialization, the endpoints,
and the generation behind one call.
"""
