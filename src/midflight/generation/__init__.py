"""Everything that answers Generator from elsewhere, and the HTTP contract that carries it.

driver.py          the thread that owns a Generator and steps it
served_requests.py            one HTTP request in flight: from GenerationRequests to text, tokens and a finish reason
text.py            tokens to text while they come: whole characters, stop strings
schemas.py         what goes over the wire
http_errors.py     every error in the OpenAI shape; the body limit; the admin token
request_parsing.py a request body becomes GenerationRequests
responses.py       deltas become OpenAI responses and chunks
openai_routes.py   /v1/completions, /v1/chat/completions, /v1/models
control_routes.py  abort, pause, resume, health, metrics, weights
server.py          the application
client.py          a Generator that is somewhere else
reference.py       a Reference that is somewhere else
"""
