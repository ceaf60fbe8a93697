"""Files that survive: mapped into memory, checked before they are used, written by one."""
