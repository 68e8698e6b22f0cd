"""The life of one optimizer step: `monitor` tells it in order, `stage` names its stages."""
