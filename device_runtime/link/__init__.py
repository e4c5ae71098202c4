"""The device's side of the connection: an edge that is asked, lost, waited for and found again."""
