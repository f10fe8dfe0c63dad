"""Tools for people at a terminal. The library is complete without this room; nothing outside it imports it."""
