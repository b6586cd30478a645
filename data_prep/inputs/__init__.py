"""Input files: which there are, how documents are read from them; and what every data folder keeps."""
