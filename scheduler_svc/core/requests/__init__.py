"""Requests: acceptance, recovery, attachment of gateways, endings, messages for gateways, and how
long the outputs log must keep them.
"""
