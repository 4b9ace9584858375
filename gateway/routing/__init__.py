"""Routing: which endpoint should serve a prompt. Pure: no asyncio, torch, redis, clock, randomness or sockets here.

Time and randomness come in as values, so the gateway, the simulator and `/admin/explain` run this very code.
"""
