"""Op implementations, one subpackage per platform; `lutjax.dispatch` selects among them."""
