"""A certification as one page of HTML that needs nothing else: no script, picture or network."""
