"""One file a family of stock Hugging Face models: how it is cut into layers.

To add a family: write ``families/<name>.py`` with a :class:`galvatron.models.layer.CutModel` (``layers`` in order and
with the kinds of the planner's model, ``ties``, ``context``), and add its stock class to ``FAMILIES`` in
``galvatron.models.registry``. A model of no family is cut by ``galvatron.models.generic``.
"""
