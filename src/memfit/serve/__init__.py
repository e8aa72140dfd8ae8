"""The HTTP side: a classifier's API, and the page of a run that trains.

What answers here is FastAPI on uvicorn; the model itself is `run.inference.Classifier`.
"""
