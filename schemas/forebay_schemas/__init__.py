"""Wire models of Forebay; needs pydantic only."""
