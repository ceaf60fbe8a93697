"""Where documents are kept and searched: the `Store` protocol, and a store on local disks."""
