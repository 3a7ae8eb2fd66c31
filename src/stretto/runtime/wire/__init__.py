"""The wire: how messages between stages travel. One interface, several transports."""
