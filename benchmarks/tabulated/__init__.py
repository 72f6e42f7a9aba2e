"""Tables and figures of the pages, from the records, with the standard library only."""
