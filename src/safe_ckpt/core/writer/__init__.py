"""The writer process: started, fed, watched, replaced."""
