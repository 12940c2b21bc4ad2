"""The Messages API, for clients of Anthropic's: an adapter on the chats of the gateway.

blocks, body    what clients send
chat_request    the chat that it asks for
content, serializer  what they get: blocks of content, whole and streamed
errors          the shape of errors
"""
