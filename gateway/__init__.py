"""The router: sends each request to the worker that will answer it soonest. Imports worker.prompt and worker.protocol only."""

__version__ = "0.1.0"
