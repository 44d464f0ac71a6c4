"""Generators and references behind HTTP: the server, its clients, and a pool of engines that acts as one Generator.

driver.py           the thread that owns a Generator and steps it
served_requests.py  HTTP requests in flight: from GenerationRequests to deltas of text and tokens
stop_cut.py         the end of a response at its stop string
text.py             incremental detokenization: whole characters, stop strings
schemas.py          JSON bodies of requests and responses
http_errors.py      errors in the OpenAI format; the limit on request bodies; the admin token
request_parsing.py  from a request body to GenerationRequests
responses.py        from deltas to OpenAI responses and chunks
openai_routes.py    /v1/completions, /v1/chat/completions, /v1/models
control_routes.py   abort, pause, resume, health, metrics, adopt, weights
weight_intake.py    weights from the trainer to the engine of this server
weight_pull.py      weights that a server takes itself, such as from files
disconnects.py      answers that end early if their client disconnects
server.py           the application
client.py           HTTPGenerator, a Generator over a server
background_client.py  the thread of an HTTPGenerator, with an event loop
rollout_stream.py   the requests of an HTTPGenerator, and their tokens
stream_messages.py  messages of the rollout stream
stream_route.py     the server's end of the rollout stream
answers.py          answers that refuse a request, as exceptions
adoption.py         the weight version of an HTTPGenerator's server
reference.py        HTTPReference, a Reference over a server
pool.py             EnginePool, a Generator over any number of engines
members.py          the engines of a pool and their weight versions
placement.py        the choice of an engine for each request
registry.py         the servers of a run, by name
"""
