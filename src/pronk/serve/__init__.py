"""`pronk serve`: an HTTP server that speaks OpenAI's API, and Anthropic's messages, over Session."""
