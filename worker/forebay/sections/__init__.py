"""The sections of a worker's settings: frozen, each with its bounds and the sentence that the reference page shows.

A room gets its section, never the whole settings; `forebay.settings` puts the sections together and reads them.
"""
