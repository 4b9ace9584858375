"""The router: sends each request to the worker that will answer it soonest.

From worker it imports worker.prompt and worker.protocol only.
"""

__version__ = "0.1.0"
