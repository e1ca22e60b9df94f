-- KEYS[1] meta  [2] due  [3] ended  [4] buckets
-- ARGV[1] owner  [2] prefix of other keys
-- Returns the checkpoint and, if there is one, its seal and its format. HDEL comes first: a full Redis never refuses it, and
-- refuses no write of a script that has already written.
redis.call('HDEL', KEYS[1], 'cleared')
redis.call('HSET', KEYS[1], 'owner', ARGV[1])
local found = mark()
if not found[1] then
  return found
end

-- Each job has a due or end time and a record, so these numbers are equal. Up to this limit, counting takes less than
-- 100 ms. In a larger shard, a lost bucket is detected when one of its jobs is looked up.
if redis.call('SCARD', KEYS[4]) <= 100000 then
  local records = 0
  for _, bucket in ipairs(redis.call('SMEMBERS', KEYS[4])) do
    records = records + redis.call('HLEN', ARGV[2] .. 'job:' .. bucket)
  end
  if records ~= redis.call('ZCARD', KEYS[2]) + redis.call('ZCARD', KEYS[3]) then
    return without_mark()
  end
end
found[3] = redis.call('HGET', KEYS[1], 'seal')
found[4] = redis.call('HGET', KEYS[1], 'format')
return found
