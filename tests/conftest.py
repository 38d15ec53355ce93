import os

os.environ["HF_HUB_OFFLINE"] = "1"
