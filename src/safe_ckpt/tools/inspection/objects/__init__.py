"""The same for what is in an object store: listed, verified, inspected and fetched, without owning anything."""
