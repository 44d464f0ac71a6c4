"""Generators and references behind HTTP: the server, its clients, and a pool of engines that acts as one Generator.

driver.py           the thread that owns a Generator and steps it
served_requests.py  HTTP requests in flight: from GenerationRequests to deltas of text and tokens
text.py             incremental detokenization: whole characters, stop strings
schemas.py          JSON bodies of requests and responses
http_errors.py      errors in the OpenAI format; the limit on request bodies; the admin token
request_parsing.py  from a request body to GenerationRequests
responses.py        from deltas to OpenAI responses and chunks
openai_routes.py    /v1/completions, /v1/chat/completions, /v1/models
control_routes.py   abort, pause, resume, health, metrics, weights
server.py           the application
client.py           HTTPGenerator, a Generator over a server
token_streams.py    the token streams of an HTTPGenerator
reference.py        HTTPReference, a Reference over a server
pool.py             EnginePool, a Generator over any number of engines
members.py          the engines of a pool and their weights
placement.py        the choice of an engine for each request
"""
